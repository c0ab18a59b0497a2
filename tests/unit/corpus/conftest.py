import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """No cache of others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
