"""A configuration that changes under the daemon, as a ConfigMap's file does."""

from __future__ import annotations

from pathlib import Path

from warpwatch_daemon.agent.reloading import ConfigWatch
from warpwatch_daemon.cli import main


def publish(folder: Path, version: str, content: str) -> None:
    """As the kubelet does: a new folder, and a link to it that is exchanged in one go."""
    (folder / version).mkdir()
    (folder / version / "warpwatch.yaml").write_text(content)
    link = folder / "..data_tmp"
    link.symlink_to(version)
    link.rename(folder / "..data")


def test_only_new_content_is_a_change_and_only_once(tmp_path):
    file = tmp_path / "warpwatch.yaml"
    file.symlink_to("..data/warpwatch.yaml")
    publish(tmp_path, "..1", "triggers: {dry_run: false}")
    watch = ConfigWatch(file)
    assert not watch.changed()
    publish(tmp_path, "..2", "triggers: {dry_run: false}")
    assert not watch.changed()
    publish(tmp_path, "..3", "triggers: {dry_run: true}")
    assert [watch.changed(), watch.changed()] == [True, False]
    # A file that is away for a moment is no change either.
    file.unlink()
    assert not watch.changed()
    file.write_text("triggers: {dry_run: true}")
    assert not watch.changed()


def test_watching_needs_a_file(capsys):
    assert main(["daemon", "--watch-config"]) == 2
    assert "--watch-config needs --config FILE" in capsys.readouterr().err
