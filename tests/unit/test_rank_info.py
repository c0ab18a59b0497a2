"""Facts about a rank's memory."""

import pytest

from mntrain.rank_info import available_memory, cgroup_rooms


def limit(folder, names, most, used):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (most, used), strict=True):
        (folder / name).write_text(f"{value}\n")


V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


@pytest.mark.parametrize(
    ("own_groups", "top", "names"),
    [
        ("0::/slurm/job_7/step_0\n", "", V2),
        ("4:cpu,cpuacct:/\n3:memory:/slurm/job_7/step_0\n", "memory", V1),
    ],
)
def test_limits_of_all_cgroups_above_a_process_count(tmp_path, own_groups, top, names):
    root = tmp_path / "cgroup"
    job = root / top / "slurm" / "job_7"
    limit(job / "step_0", names, "max", 300)
    limit(job, names, 1000, 400)
    limit(root / top, names, 5000, 4900)
    limit(tmp_path, names, 10, 10)  # above the root: none
    assert list(cgroup_rooms(own_groups, root)) == [600, 100]


def test_without_limits_there_is_no_room_of_a_cgroup(tmp_path):
    assert list(cgroup_rooms("0::/\n", tmp_path)) == []


def test_this_process_has_memory_left():
    assert (available_memory() or 1) > 0
