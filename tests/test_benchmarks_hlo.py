"""HBM bytes of compiled graphs, from HLO text whose sums are worked out by hand."""

import pytest

from benchmarks import hlo

TILE = 8 * 128 * 4  # bytes of a tile of float32


def entry(*lines):
    return "ENTRY %main (p: f32[8,128]) -> f32[8,128] {\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


@pytest.mark.parametrize(
    "shape, elements, nbytes, in_hbm",
    [
        ("f32[3,130]{1,0:T(8,128)}", 3 * 130, 2 * TILE, True),  # 8 x 256
        ("f32[3,130]{0,1:T(8,128)}", 3 * 130, 17 * TILE, True),  # the other way round: 136 x 128
        ("bf16[2,16,9]{2,1,0:T(8,128)(2,1)S(1)}", 2 * 16 * 9, 2 * 16 * 128 * 2, False),
        ("pred[130]{0:T(512)(128)(4,1)}", 130, 512, True),
        ("f32[]{:T(128)S(6)}", 1, 128 * 4, False),
        ("s64[5]", 5, 40, True),
        ("u4[256]{0:T(256)}", 256, 128, True),
    ],
)
def test_an_array_has_the_size_of_its_tiles_and_the_space_of_its_layout(shape, elements, nbytes, in_hbm):
    assert hlo.parse_arrays(shape) == [hlo.Array(elements, nbytes, in_hbm)]


def test_an_operation_moves_each_operand_once_and_its_result_if_they_are_not_in_vmem():
    text = entry(
        "%p = f32[8,128]{1,0:T(8,128)} parameter(0)",
        "%c = f32[]{:T(128)} constant(1)",
        "%a = f32[8,256]{1,0:T(8,128)S(1)} concatenate(%p, %p), dimensions={1}",
        "ROOT %b = f32[8,128]{1,0:T(8,128)} slice(%a), slice={[0:8], [0:128]}",
    )
    assert hlo.operations(text) == [("a", TILE), ("b", TILE)]  # p, and the result


def test_an_asynchronous_copy_into_vmem_moves_its_bytes_once():
    text = entry(
        "%p = f32[16,128]{1,0:T(8,128)} parameter(0)",
        "%s = (f32[16,128]{1,0:T(8,128)S(1)}, f32[16,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p)",
        "%d = f32[16,128]{1,0:T(8,128)S(1)} copy-done(%s)",
        "%t = ((f32[16,128]{1,0:T(8,128)}), f32[8,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%p),"
        " slice={[0:8]}",
        "ROOT %e = f32[8,128]{1,0:T(8,128)S(1)} slice-done(%t)",
    )
    assert hlo.nbytes(text) == 3 * TILE  # the copy reads two tiles, and the slice one of the two


def test_a_loop_counts_as_often_as_it_runs():
    text = (
        "%body (b: (f32[8,128])) -> (f32[8,128]) {\n"
        "  %b = (f32[8,128]{1,0:T(8,128)}) parameter(0)\n"
        "  %g = f32[8,128]{1,0:T(8,128)} get-tuple-element(%b), index=0\n"
        "  %n = f32[8,128]{1,0:T(8,128)} negate(%g)\n"
        "  ROOT %r = (f32[8,128]{1,0:T(8,128)}) tuple(%n)\n"
        "}\n\n"
        + entry(
            "%p = (f32[8,128]{1,0:T(8,128)}) parameter(0)",
            "ROOT %w = (f32[8,128]{1,0:T(8,128)}) while(%p), condition=%c, body=%body, "
            'backend_config={"known_trip_count":{"n":"7"}}',
        )
    )
    assert hlo.operations(text) == [("n", 7 * 2 * TILE)]


def test_a_fusion_reads_of_an_operand_what_it_slices_and_writes_of_an_array_in_place_what_it_updates():
    text = (
        "%fused (a: f32[80,128], b: f32[80,128]) -> f32[80,128] {\n"
        "  %a = f32[80,128]{1,0:T(8,128)} parameter(0)\n"
        "  %b = f32[80,128]{1,0:T(8,128)} parameter(1)\n"
        "  %i = s32[]{:T(128)} parameter(2)\n"
        "  %x = f32[8,128]{1,0:T(8,128)} dynamic-slice(%b, %i, %i), dynamic_slice_sizes={8,128}\n"
        "  ROOT %u = f32[80,128]{1,0:T(8,128)} dynamic-update-slice(%a, %x, %i, %i)\n"
        "}\n\n"
        + entry(
            "%p = f32[80,128]{1,0:T(8,128)} parameter(0)",
            "%q = f32[80,128]{1,0:T(8,128)} parameter(1)",
            "%i = s32[]{:S(2)} parameter(2)",
            "ROOT %f = f32[80,128]{1,0:T(8,128)} fusion(%p, %q, %i), kind=kLoop, calls=%fused",
        )
    )
    assert hlo.nbytes(text) == 2 * TILE  # one tile of ten is read of q, and one written into p


def test_a_custom_call_moves_its_operands_and_results_and_what_only_renames_is_free():
    text = entry(
        "%p = s64[8,128]{1,0:T(8,128)} parameter(0)",
        '%l = u32[8,128]{1,0:T(8,128)} custom-call(%p), custom_call_target="X64SplitLow"',
        '%k = f32[8,128]{1,0:T(8,128)} custom-call(%l), custom_call_target="tpu_custom_call",'
        ' metadata={op_name="x/flash" source_file="/a/b/attention.py" source_line=7},'
        ' backend_config={"body":"%nothing = (x)"}',
        "ROOT %b = f32[1024]{0:T(1024)} bitcast(%k)",
    )
    assert hlo.operations(text) == [("k", 2 * TILE)]
