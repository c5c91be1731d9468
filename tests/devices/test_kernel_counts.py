"""Kernels that are reported while a plan is traced."""

from tpukit.devices.kernel_counts import count_kernel, recorded


def test_kernels_are_recorded_where_a_plan_is_made_and_nowhere_else():
    count_kernel("before", hbm_bytes=1, flops=1)
    with recorded() as found:
        count_kernel("flash", hbm_bytes=2, flops=3)
        count_kernel("flash", hbm_bytes=2, flops=3)
    count_kernel("after", hbm_bytes=1, flops=1)
    assert found == 2 * [dict(name="flash", hbm_bytes=2, flops=3)]
