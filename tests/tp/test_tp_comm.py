"""A group of one rank: nothing is copied, and nobody is waited for."""

from array import array

import pytest
import torch

from tllm_core.engines.tp.comm import Alone


def test_one_rank_is_the_whole() -> None:
    alone, x, values = Alone(), torch.ones(2, 3), array("i", [1, 2])
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.all_reduce(x) is x
    assert alone.gather(x) is x
    assert alone.broadcast(values) is values


def test_rank_0_does_not_wait_for_itself() -> None:
    with pytest.raises(ValueError, match="rank 0 broadcasts"):
        Alone().broadcast(None)


def test_closing_twice_is_quiet() -> None:
    alone = Alone()
    alone.close()
    alone.close()
