"""Ranks of one host compare places as they come to them."""

from pathlib import Path

import pytest

from mmzero.engines.watch.board import PLACE_BYTES, SLOTS, Board, Page, as_place, as_text
from mmzero.engines.watch.trail import Trail
from mmzero.errors import RanksPartedError


def boards(count: int, elsewhere: int = 0) -> list[Board]:
    """Boards of some ranks, the last of them on other hosts."""
    made = [Board(rank) for rank in range(count)]
    paths = [str(board.path) for board in made] + ['/nowhere/page'] * elsewhere
    for board in made:
        board.open(paths)
    for board in made:
        board.remove_file()
        assert not board.path.exists()
    return made


def test_the_second_sees_that_the_first_is_elsewhere() -> None:
    one, other = boards(2)
    assert [one.come_to(i, f'place {i}') for i in range(3)] == [None] * 3
    assert [other.come_to(i, f'place {i}') for i in range(2)] == [None] * 2
    assert other.come_to(2, 'another') == (0, 'place 2')


@pytest.mark.parametrize('astray', range(4))
def test_any_of_many_is_seen(astray: int) -> None:
    found = [board.come_to(0, 'b' if rank == astray else 'a') for rank, board in enumerate(boards(4, elsewhere=2))]
    # It sees the first one, and all after it see it.
    assert found == [None] * max(astray, 1) + [(0, 'a')] * bool(astray) + [(astray, 'b')] * (3 - astray)


def test_one_that_is_behind_or_far_ahead_is_no_fault() -> None:
    one, other = boards(2)
    for index in range(2 * SLOTS):
        assert one.come_to(index, f'place {index}') is None
    assert other.come_to(0, 'place 0') is None
    assert other.come_to(2 * SLOTS - 1, 'another') == (0, f'place {2 * SLOTS - 1}')


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('os.posix_fallocate', full)
    board = Board(0)
    assert board.come_to(0, 'a') is None and board.own.last()[0] == 'a' and not board.path.exists()


def test_alone_on_its_host() -> None:
    (board,) = boards(1, elsewhere=1)
    assert board.come_to(0, 'a') is None and list(board.pages) == [0]


def test_last(tmp_path: Path) -> None:
    page = Page(tmp_path / 'page', create=True)
    assert page.last() == ('', '')
    for index in range(SLOTS + 3):
        page.write(index, as_place(f'place {index}'))
    page.note('in train_step 7')
    assert Page(tmp_path / 'page').last() == (f'place {SLOTS + 2}', 'in train_step 7')
    page.note('x' * 1000)
    assert set(page.last()[1]) == {'x'}


def test_long_places_keep_their_end() -> None:
    assert as_text(as_place('x' * 1000 + ' (Block)')).endswith('x (Block)')
    assert len(as_place('ü' * 1000)) == PLACE_BYTES


def test_error_names_both() -> None:
    ranks = [Trail(), Trail()]
    for trail, board in zip(ranks, boards(2), strict=True):
        trail.start_on(board)
        trail.note('in train_step 3')
    ranks[0].come_to('the forward of the unit a (A)')
    wanted = (
        'rank 1 has come to the forward of the unit b .B., in train_step 3, '
        'and rank 0 to the forward of the unit a .A., in train_step 3'
    )
    with pytest.raises(RanksPartedError, match=wanted):
        ranks[1].come_to('the forward of the unit b (B)')
