"""Jobs that end before their run is complete, and jobs that resume it."""

import json

import pytest
from job import ckpt, completed, losses, metrics, steps_kept, summary, train
from launch import TESTS


@pytest.mark.thorough
def test_a_damaged_checkpoint_is_skipped_and_its_steps_are_taken_again(tmp_path):
    saves = ["--checkpoint.every", "2"]
    result = completed(train(2, tmp_path, *saves, "--run.stop-after", "3"))
    assert "step 3  step-00000003 is safe: " in result.stdout
    first = summary(tmp_path)
    assert (first["status"], first["steps"]) == ("stopped", 3)
    assert first["reason"] == "--run.stop-after 3"
    assert first["checkpoint"].endswith("checkpoints/step-00000003")
    assert first["resumed_from"] is None
    newest = tmp_path / "run" / "checkpoints" / "step-00000003" / "optimizer.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    sound = newest.parent.with_name("step-00000002")
    code, said, errors = ckpt("verify", tmp_path / "run", sound)
    assert code == 1
    assert errors.count("optimizer.safetensors is damaged between bytes") == 1
    assert "step-00000002: sound, " in said
    again = completed(train(2, tmp_path, *saves, "--run.stop-after", "4"))
    assert "warning: step-00000003 was passed over: rank " in again.stderr
    assert ": optimizer.safetensors is damaged between bytes " in again.stderr
    assert "resumed after step 2, from " in again.stdout
    assert "(saved by 2 ranks on 1 node)" in again.stdout
    assert "this job ends after step 4 of 6 (--run.stop-after)\n" in again.stdout
    assert "changed since then" not in again.stdout
    assert "is not that of the checkpoint" not in again.stderr
    last = summary(tmp_path)
    assert (last["status"], last["steps"]) == ("stopped", 4)
    assert last["resumed_from"].endswith("checkpoints/step-00000002")
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4]
    assert steps_kept(tmp_path / "run") == [4, 2]
    assert (tmp_path / "run" / "checkpoints" / "step-00000003.aside").is_dir()


OLD = TESTS / "data" / "checkpoint-0.1"
OLD_OPTIONS = [
    *("--data.path", str(OLD / "corpus.txt"), "--zero.stage", "2", "--train.precision"),
    *("bf16-pure", "--model.layers", "1", "--model.width", "16", "--optim.lr", "0.02"),
]


@pytest.mark.thorough
def test_a_checkpoint_of_version_0_1_is_sound_and_resumed(tmp_path):
    code, said, errors = ckpt("verify", OLD / "step-00000003")
    assert (code, errors) == (0, "")
    assert said.replace("\n", "").endswith("step-00000003: sound, 0.1 MB")
    resume = ["--run.resume", str(OLD / "step-00000003")]
    result = completed(train(1, tmp_path, *OLD_OPTIONS, *resume))
    assert "(saved by 3 ranks on 1 node)" in result.stdout
    assert [line["step"] for line in metrics(tmp_path)] == [4, 5, 6]
    expected = json.loads((OLD / "losses.json").read_text())[3:]
    # That version took the samples in another order; a run that began anew has 5.5 and more.
    assert "the version that saved it took samples in another order" in result.stderr
    assert losses(tmp_path) == pytest.approx(expected, rel=2e-2)
    assert max(losses(tmp_path)) < 5
