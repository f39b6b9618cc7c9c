"""Finding a usable Apptainer or SingularityCE, and what it is told of its files and configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandboxes.backends.apptainer.program import find_program, process_options
from sandboxes.errors import BackendUnavailable

_CONFIGURATION = """# comment
config passwd = yes
bind path = /etc/localtime
sessiondir max size = 64
allow container dir = yes
"""
_PROGRAM = """#!/bin/sh
if [ "$1" = --config ]; then
    [ {configurable} = yes ] || {{ echo "--config requires to be root" >&2; exit 255; }}
    shift 2
fi
case "$1" in
--version) echo "{version}" ;;
buildcfg) echo "{family}_CONF_FILE={configuration}" ;;
esac
"""


def _install(folder: Path, version: str, *, family: str = "APPTAINER", configurable: str = "yes") -> str:
    configuration = folder / "program.conf"
    configuration.write_text(_CONFIGURATION)
    program = folder / "program"
    program.write_text(_PROGRAM.format(version=version, family=family, configuration=configuration, configurable=configurable))
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("text", "family", "product", "version"),
    [
        ("apptainer version 1.4.5", "APPTAINER", "apptainer", "1.4.5"),
        ("apptainer version 1.3.0-1.el9", "APPTAINER", "apptainer", "1.3.0"),
        ("singularity-ce version 4.1.2-focal", "SINGULARITY", "singularity-ce", "4.1.2"),
    ],
)
def test_apptainer_and_singularity_ce_are_told_apart_by_what_they_say(
    text: str, family: str, product: str, version: str, tmp_path: Path
):
    program = find_program(_install(tmp_path, text, family=family), None)
    assert (program.product, program.version) == (product, version)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("apptainer version 1.0.3", "is apptainer 1.0.3, which is too old"),
        ("singularity version 3.8.7", "is neither Apptainer nor SingularityCE"),
        ("podman version 4.3.1", "is neither Apptainer nor SingularityCE"),
    ],
)
def test_others_are_refused_with_their_name_and_the_fix(text: str, problem: str, tmp_path: Path):
    path = _install(tmp_path, text)
    with pytest.raises(BackendUnavailable, match=f"{path} {problem}.*set PRORL_APPTAINER"):
        find_program(path, None)


def test_a_chosen_program_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(BackendUnavailable, match=f"{tmp_path}/none"):
        find_program(str(tmp_path / "none"), None)


def test_sandboxes_get_a_configuration_of_their_own_where_that_is_allowed(tmp_path: Path):
    command = find_program(_install(tmp_path, "apptainer version 1.4.5"), None).with_configuration(100)
    assert command[1] == "--config"
    lines = Path(command[2]).read_text().splitlines()
    assert "allow container dir = yes" in lines  # the administrator's
    assert "sessiondir max size = 100" in lines and "sessiondir max size = 64" not in lines
    assert "config passwd = no" in lines and not any(line.startswith("bind path") for line in lines)


def test_where_it_is_not_the_installations_bound_is_told(tmp_path: Path):
    program = find_program(_install(tmp_path, "apptainer version 1.4.5", configurable="no"), None)
    assert program.with_configuration(100) == [program.path]
    assert program.enforced() == {"disk_mb": "tmpfs size, 64 MiB by apptainer.conf"}


def test_it_gets_nothing_of_our_environment_and_both_families_of_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRORL_SECRET_KEY", "secret")
    monkeypatch.setenv("APPTAINER_BIND", "/root")
    variables = process_options(None, tmp_path)["env"]
    folders = {"TMPDIR": "tmp", "CACHEDIR": "cache", "CONFIGDIR": "config"}
    expected = {}
    for name, folder in folders.items():
        expected |= {f"{family}_{name}": f"{tmp_path}/{folder}" for family in ("APPTAINER", "SINGULARITY")}
    assert variables.keys() == {"PATH", "HOME", "LANG", *expected}
    assert variables.items() >= expected.items()
    assert os.environ["PRORL_SECRET_KEY"] not in variables.values()
