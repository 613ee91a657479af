"""What judges a model in ``nxdt evaluate`` comes from plugins, and one that is missing is named."""

from __future__ import annotations


def test_tasks_without_a_suite_name_the_distribution_to_install(nxdt):
    done = nxdt("evaluate", "nowhere", "--task", "hellaswag", uninstalled=("nxdt-plugin-evaluate",))
    assert done.returncode == 2
    assert "No task is called 'lm-eval' (nxdt evaluate --suite)" in done.stderr
    assert "pip install nxdt-plugin-evaluate" in done.stderr


def test_a_suite_of_a_third_party_is_asked_before_the_model_is_loaded(nxdt, dist):
    entry = """
from nxdt_core.api import Component, hookimpl

@hookimpl
def nxdt_tasks():
    return [Component(name="exams", target="acme_exams:Exams")]
"""
    exams = """
from nxdt_core.errors.data import NothingToJudge
from nxdt_core.protocols.evaluation import TaskSuite

class Exams(TaskSuite):
    def __init__(self, tasks, path):
        raise NothingToJudge(found=f"there is no exam {tasks[0]}")

    def run(self, model, *, limit):
        return {}
"""
    dist("nxdt_acme", entry, acme_exams=exams)
    done = nxdt("evaluate", "nowhere", "--task", "latin", uninstalled=("nxdt-plugin-evaluate",))
    assert done.returncode == 2
    assert "there is no exam latin" in done.stderr
    both = nxdt("evaluate", "nowhere", "--task", "latin")
    assert "'nxdt_acme:exams'" in both.stderr
    assert "'evaluate:lm-eval'" in both.stderr
    assert "there is no exam latin" in nxdt("evaluate", "x", "--task", "latin", "--suite", "exams").stderr
