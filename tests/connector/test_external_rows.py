from __future__ import annotations

from hsconnector.connector.external_rows import ExternalRows

LOADED = "32 tokens were loaded from outside and have no hidden states here"


def external(block_size: int = 8, hit_size: int = 16) -> ExternalRows:
    return ExternalRows(block_size, hit_size)


def test_what_the_engine_has_itself_is_ours() -> None:
    o = external()
    o.offered("a", 32)
    assert o.arrived("a", [1, 2, 3, 4, 5], 32) is None
    assert o.hit([1, 2, 3, 4], 32) is None
    assert o.arrived("b", [6], 0) is None


def test_a_request_that_was_given_more_than_the_engine_had() -> None:
    o = external()
    o.offered("a", 16)
    assert o.arrived("a", range(1, 9), 48) == LOADED
    assert o.hit([1, 2, 9], 16) is None
    assert o.hit([1, 2, 3, 9], 24) == "rows from 16 to 23 were found in blocks that were loaded from outside"
    assert o.hit(range(1, 8), 48) == "rows from 16 to 47 were found in blocks that were loaded from outside"


def test_the_tail_of_a_local_hit_is_not_shown_to_connectors() -> None:
    o = external()
    o.offered("a", 16)
    assert o.arrived("a", [1, 2, 3, 4], 24) is None
    o.offered("b", 0)
    assert o.arrived("b", [5, 6], 16) is not None
    o.offered("c", 16)
    assert o.arrived("c", [1, 2, 3, 4], 24) is not None, (
        "where anybody loads, nothing is given the benefit of the doubt"
    )


def test_blocks_that_are_computed_here_again_are_ours_again() -> None:
    o = external()
    o.offered("a", 0)
    o.loaded("a", 32, [1, 2, 3, 4, 5])
    assert o.arrived("a", [1, 2, 3, 4, 5], 32) == LOADED
    assert o.hit([1, 2, 6], 16) is not None
    assert o.fresh([1, 2, 3], 9) == [3]
    o.computed(o.fresh([7, 1, 2], 8))
    assert o.hit([1, 2, 6], 16) is None
    assert o.hit([3, 6], 8) == "rows from 0 to 7 were found in blocks that were loaded from outside"


def test_nothing_is_kept_of_requests_that_are_over() -> None:
    o = external()
    o.offered("a", 8)
    o.offered("b", 8)
    o.forget("a")
    o.forget("unknown")
    o.arrived("b", [1], 8)
    assert not o._local
