"""How much of what its GPUs could compute a model uses."""

import pytest

from mntrain.metrics.step import peak, peak_of_job

H100 = ("uuid-1", "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("model", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "fp16", 989),
        ("NVIDIA H200 NVL", "bf16", 836),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA A10G", "bf16", 70),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ],
)
def test_a_gpu_has_the_peak_of_its_data_sheet(model, dtype, tera):
    assert peak(model, dtype) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),  # a seventh of one
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),  # another chip
        ("NVIDIA GeForce RTX 4090 D", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"),  # it has no unit for it
        ("AMD Instinct MI300X", "bf16"),
        ("", "fp32"),
    ],
)
def test_what_is_not_known_has_none(model, dtype):
    assert peak(model, dtype) is None


def test_peaks_add_up_over_gpus_and_a_shared_one_counts_once():
    one = peak(H100[1], "bf16")
    assert peak_of_job([H100, H100], "bf16") == one
    assert peak_of_job([H100, ("uuid-2", H100[1])], "bf16") == 2 * one


def test_with_one_that_is_unknown_the_peak_of_job_is():
    assert peak_of_job([H100, ("", "")], "bf16") is None
    assert peak_of_job([("", "")], "fp32") is None
