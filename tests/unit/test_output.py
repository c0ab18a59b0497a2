"""Notes and warnings, which rank 0 prints, or a display shows."""

import pytest

from mntrain.output import Output


@pytest.mark.parametrize("master", [True, False])
def test_warnings_are_printed_on_rank_0_until_a_display_shows_all(capsys, master):
    output, shown = Output(master), []
    output.note("an event")
    output.warn("a problem")
    output.show_by(shown.append, shown.append)
    output.note("another event")
    output.warn("another problem")
    assert capsys.readouterr() == ("", "mntrain: warning: a problem\n" * master)
    assert shown == ["another event", "another problem"]
