# SPDX-License-Identifier: Apache-2.0
"""What the workflows may run: whose code, on which machine, and what a release publishes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.skipif(not FILES, reason="no workflows here")


def workflow(path):
    text = path.read_text()
    found = pytest.importorskip("yaml").safe_load(text)
    return found[True], found["jobs"], text  # YAML reads "on" as true


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_actions_and_tools_are_named_by_what_they_are(path):
    _, jobs, text = workflow(path)
    for step in (step for job in jobs.values() for step in job["steps"]):
        if "uses" in step:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"])
        for command in re.findall(r"pip install (.*)", step.get("run", "")):
            locked = re.fullmatch(r"--require-hashes -r ci/locks/[\w-]+\.txt", command)
            assert locked or command.startswith("wheelhouse/*.whl")
    versions = re.findall(r"uses: \S+ # v\d+\.\d+\.\d+$", text, re.MULTILINE)
    assert len(versions) == text.count("uses:")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_pull_request_comes_to_a_machine_of_ours(path):
    """A fork's pull request brings its own workflow; this asks for no more than a machine lent."""
    triggers, jobs, _ = workflow(path)
    own = any("self-hosted" in str(job["runs-on"]) for job in jobs.values())
    assert own == (path.stem == "gpu")
    if own:
        assert set(triggers) == {"push", "workflow_dispatch"}
    assert "pull_request_target" not in triggers


def test_what_is_published_is_named():
    _, jobs, _ = workflow(ROOT / ".github" / "workflows" / "wheels.yml")

    def artifacts(*names):
        found = [step for name in names for step in jobs[name]["steps"]]
        return [step["with"]["name"] for step in found if "artifact@" in step.get("uses", "")]

    kept = artifacts("sdist", "wheel")
    processors = [each["processor"] for each in jobs["wheel"]["strategy"]["matrix"]["include"]]
    made = [name.replace("${{ matrix.processor }}", p) for name in kept for p in processors]
    assert sorted(artifacts("publish")) == sorted(set(made))
    options = [step.get("with", {}) for step in jobs["publish"]["steps"]]
    assert not any({"pattern", "merge-multiple", "artifact-ids"} & set(given) for given in options)
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
