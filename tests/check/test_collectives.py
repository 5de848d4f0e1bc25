from sgpo_jax.check.collectives import Collective, collectives

PROGRAM = """HloModule jit_f, entry_computation_layout={()->()}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%inner_body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %ar = (f32[4]{0}, bf16[2,3]{1,0}) all-reduce(%x, %y), channel_id=2, replica_groups={{0,1}}, to_apply=%add
}

%inner_condition (p: (s32[], f32[4])) -> pred[] {
  %n = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %ag = f32[8,16]{1,0:T(8,128)} all-gather(%x), channel_id=1, dimensions={0}
  %w = (s32[], f32[4]) while(%t), condition=%inner_condition, body=%inner_body
}

%condition (p: (s32[], f32[4])) -> pred[] {
  ROOT %c = pred[] fusion(%i), kind=kLoop, calls=%compare
}

%compare (i: s32[]) -> pred[] {
  ROOT %lt = pred[] compare(%i, %j), direction=LT
}

%async (x: f32[4]) -> f32[8] {
  ROOT %a = f32[8]{0} all-to-all(%x), channel_id=9
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %s = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), channel_id=3
  %d = f32[8]{0} all-gather-done(%s)
  %p = (s8[7]{0}, s8[7]{0}, u32[], u32[]) collective-permute-start(%x), channel_id=4
  %q = ((f32[4]), f32[8], u32[]) async-start(%x), calls=%async
  %r = pred[10]{0} reduce-scatter(%x), to_apply=%add
}
"""


def test_a_loops_bound_may_stand_in_a_fusion_of_its_condition():
    """As in a loop that can end early: the compiler knows no trip count, and fuses the comparison."""
    bound = "  %n = s32[] constant(16)\n  ROOT %lt = pred[] compare(%i, %n), direction=LT"
    text = PROGRAM.replace("  ROOT %lt = pred[] compare(%i, %j), direction=LT", bound)
    text = text.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
    assert collectives(text)[0] == Collective("all-gather", 16 + 1, 16 * 8 * 16 * 4 + 8 * 4)


def test_loops_multiply_what_is_in_them():
    found = collectives(PROGRAM)
    assert found == (
        Collective("all-gather", 5 + 1, 5 * 8 * 16 * 4 + 8 * 4),
        Collective("all-reduce", 5 * 6, 5 * 6 * (4 * 4 + 6 * 2)),
        Collective("reduce-scatter", 1, 10),
        Collective("all-to-all", 1, 8 * 4),
        Collective("collective-permute", 1, 7),
    )
