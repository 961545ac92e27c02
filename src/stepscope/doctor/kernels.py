"""Two GPU programs in PTX, which the driver itself compiles for whatever GPU there is.

`matrix_product` multiplies matrices in registers only: tensor cores work, device memory rests. Each
round has eight products that do not wait for each other. What comes out is stored only if it is
negative, which it never is, but the compiler cannot know that. `nothing` is as small as a kernel
can be.
"""

from __future__ import annotations

_PRODUCTS = 8
_ACCUMULATORS = 4 * _PRODUCTS
"""A product of 16×16 and 16×8 leaves four numbers in each thread of a warp."""


def _product(number: int) -> str:
    sums = ", ".join(f"%sum{4 * number + place}" for place in range(4))
    return (
        "    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32\n"
        f"        {{{sums}}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{{sums}}};"
    )


def _lines(template: str, numbers: range) -> str:
    return "\n".join(template.format(n) for n in numbers)


PROGRAM = f"""\
.version 7.0
.target sm_80
.address_size 64

.visible .entry nothing()
{{
    ret;
}}

.visible .entry matrix_product(.param .u64 where, .param .u32 rounds)
{{
    .reg .pred %again, %negative;
    .reg .b32 %thread, %left, %a<4>, %b<2>;
    .reg .f32 %sum<{_ACCUMULATORS}>;
    .reg .b64 %place;

    ld.param.u64 %place, [where];
    ld.param.u32 %left, [rounds];
    cvta.to.global.u64 %place, %place;

    // Pairs of bf16 between 1 and 2, not the same in every thread; sums that begin differently,
    // or eight products would be one.
    mov.u32 %thread, %tid.x;
    and.b32 %thread, %thread, 63;
    or.b32 %a0, %thread, 0x3f803f80;
    or.b32 %a1, %a0, 0x00010000;
    or.b32 %a2, %a0, 0x00020000;
    or.b32 %a3, %a0, 0x00040000;
    or.b32 %b0, %a0, 0x00080000;
    or.b32 %b1, %a0, 0x00100000;
{_lines("    mov.f32 %sum{0}, {0}.0;", range(_ACCUMULATORS))}

ROUND:
{chr(10).join(_product(number) for number in range(_PRODUCTS))}
    sub.u32 %left, %left, 1;
    setp.ne.u32 %again, %left, 0;
    @%again bra ROUND;

{_lines("    add.f32 %sum0, %sum0, %sum{0};", range(1, _ACCUMULATORS))}
    setp.lt.f32 %negative, %sum0, 0f00000000;
    @%negative st.global.f32 [%place], %sum0;
    ret;
}}
"""
