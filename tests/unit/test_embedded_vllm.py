"""Where vLLM cannot run, there is a reason for a person, and soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_site.embedded.vllm import VllmHome, VllmServer, VllmUnavailable


def test_without_a_cpu_build_of_torch_the_reason_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    home = VllmHome(tmp_path)
    lines: list[str] = []

    with pytest.raises(VllmUnavailable, match=r"torch==2\.13\.0\+cpu.* \(see .*vllm-install\.log\)"):
        home.prepare(lines.append)

    assert [line.partition(":")[0] for line in lines] == ["vLLM 1/4", "vLLM 2/4"]


def test_a_server_that_cannot_start_says_why(tmp_path: Path):
    server = VllmServer(VllmHome(tmp_path), tmp_path / "model")

    with pytest.raises(VllmUnavailable, match="No such file or directory"):
        server.start()
    server.stop()
