from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.data.draw import draw


@given(st.lists(st.text()), st.integers(0, 20), st.integers(0, 3))
def test_size_order_and_nesting(keys: list[str], count: int, seed: int) -> None:
    drawn = draw(keys, count, seed)
    assert len(drawn) == min(count, len(set(keys)))
    assert drawn <= set(keys)
    assert drawn == draw(reversed(keys), count, seed)
    assert drawn <= draw(keys, count + 1, seed)


def test_seeds_differ_and_are_even() -> None:
    keys = [str(number) for number in range(1000)]
    draws = [draw(keys, 100, seed) for seed in range(50)]
    assert len(set(draws)) == 50
    times = [sum(key in drawn for drawn in draws) for key in keys]
    assert sum(times) == 5000
    assert max(times) < 17  # binomial(50, 0.1): 17 or more has a chance of 1e-5 for each key
