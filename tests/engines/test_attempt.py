"""Ranks find each other in a store that former ranks have used."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from mmzero.engines.attempt import fresh_store, shares_agents_store

SOON = timedelta(seconds=60)


def attempt(store: dist.Store, ranks: int, absent: int | None = None) -> dict[int, dist.Store]:
    """Each rank in a thread; what they have agreed on."""
    found: dict[int, dist.Store] = {}

    def come(rank: int) -> None:
        found[rank] = fresh_store(store, rank, ranks, SOON)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(ranks) if rank != absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_attempt_has_a_part_of_its_own() -> None:
    store = dist.HashStore()
    for number, ranks in enumerate((3, 3, 2, 4, 1)):
        found = attempt(store, ranks)
        assert len(found) == ranks
        assert not any(part.check(['told']) for part in found.values())
        for part in found.values():
            assert part.add('all', 1)
        assert int(found[0].get('all')) == ranks
        found[ranks - 1].set('told', str(number))


def test_a_rank_that_comes_late_finds_the_others() -> None:
    """What it has left at the attempt before is there all the time."""
    store = dist.HashStore()
    attempt(store, 3)
    found: dict[int, dist.Store] = {}
    late = threading.Timer(0.3, lambda: found.update({2: fresh_store(store, 2, 3, SOON)}))
    late.start()
    found |= attempt(store, 3, absent=2)
    late.join()
    found[0].set('word', 'x')
    assert all(part.get('word') == b'x' for part in found.values())


def test_ranks_that_do_not_come_are_told() -> None:
    with pytest.raises(TimeoutError, match='2 ranks did not all come'):
        fresh_store(dist.HashStore(), 0, 2, timedelta(seconds=0))


@pytest.mark.parametrize('value, wanted', [('True', True), ('False', False), (None, False)])
def test_whose_store_it_is(monkeypatch: pytest.MonkeyPatch, value: str | None, wanted: bool) -> None:
    monkeypatch.delenv('TORCHELASTIC_USE_AGENT_STORE', raising=False)
    if value is not None:
        monkeypatch.setenv('TORCHELASTIC_USE_AGENT_STORE', value)
    assert shares_agents_store() is wanted
