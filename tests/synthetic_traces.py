"""Random allocation traces with all the sizes that the allocator treats differently."""

from __future__ import annotations

import hypothesis.strategies as st

from stepscope.analysis.memory.caching_allocator import AllocationTrace, KiB, MiB

SIZES = st.one_of(
    st.integers(0, 4 * KiB),
    st.integers(1, 2 * MiB),
    st.sampled_from([MiB - 1, MiB, MiB + 1, 10 * MiB - 1, 10 * MiB, 20 * MiB]),
    st.integers(MiB, 40 * MiB),
)


@st.composite
def traces(draw: st.DrawFn, max_events: int = 60) -> AllocationTrace:
    events: list[int] = []
    held: list[int] = []
    made = 0
    for releases, pick, size in draw(
        st.lists(
            st.tuples(st.booleans(), st.integers(0, 1000), SIZES),
            max_size=max_events,
            min_size=draw(st.integers(0, max_events // 2)),
        )
    ):
        if releases and held:
            events.append(~held.pop(pick % len(held)))
        else:
            events.append(size)
            held.append(made)
            made += 1
    return AllocationTrace(tuple(events))
