"""A hundred steps of the long run (tests/soak.py): nothing piles up, nothing drifts."""

from pathlib import Path

from tests.launch import run_ranks
from tests.soak import drift, growth, more, soak

STEPS = 100


def test_a_hundred_steps(tmp_path: Path) -> None:
    plain = run_ranks(soak, 1, STEPS, 0, str(tmp_path / "plain"))[0]
    ranks = run_ranks(soak, 4, STEPS, 4, str(tmp_path / "piped"), timeout=110)
    losses, parameters = drift(plain, ranks)
    assert losses < 1e-9
    assert parameters < 1e-9
    for rank in ranks:
        for name in ("threads", "handles"):
            before, after = growth(rank, name)
            assert before == after, (name, rank[name])
        assert more(rank, "objects") <= more(plain, "objects") + 20
        assert more(rank, "rss") <= more(plain, "rss") + 2**19
    assert sorted(path.name for path in (tmp_path / "piped").iterdir()) == sorted(
        path.name for path in (tmp_path / "plain").iterdir()
    )
