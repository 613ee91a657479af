"""Manifests of ``nxdt launch kubernetes`` and ``hyperpod``, against the schemas that Kubernetes and Kubeflow publish.

Kubernetes' are those of ``kubernetes-validate``, TrainJob's the models of ``kubeflow-trainer-api``. Of PyTorchJob the
names of the fields are read from ``kubeflow-training``, whose import needs a client of Kubernetes.
"""

from __future__ import annotations

import ast
from importlib.metadata import files

import pytest
import yaml

pytest.importorskip("importlib_resources", reason="make install brings it")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make install brings it")

VERSIONS = ("1.31", "1.35")
CLUSTER = {
    "image": "registry/nxdt:1",
    "instance_type": "p5.48xlarge",
    "namespace": "train",
    "claims": {"fsx": "/fsx"},
    "mounts": ["/scratch"],
    "environment": {"NCCL_DEBUG": "WARN"},
    "memory": "900Gi",
    "service_account": "trainer",
    "node_selector": {"pool": "p5"},
}
RUN = """\
base: recipe:llama-tiny
name: tiny
trainer: {devices: 8}
data: {global_batch_size: 32}
exp_manager: {exp_dir: /fsx/runs}
"""


@pytest.fixture
def manifests(nxdt, tmp_path):
    """Objects by kind of a launcher and its options, for a run in a file with two nodes."""
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))

    def make(launcher, *options):
        words = ("launch", launcher, "run.yaml", "--cluster", "cluster.yaml", "--nodes", "2", "-o", "out", *options)
        done = nxdt(*words)
        assert done.returncode == 0, done.stderr
        text = (tmp_path / "out/job.yaml").read_text()
        assert "&id" not in text
        return {each["kind"]: each for each in yaml.safe_load_all(text)}, done.stderr

    return make


def check(manifest):
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


def check_pod(spec):
    check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec})


def names(model):
    """The fields of a model of ``kubeflow-training``."""
    (path,) = [each for each in files("kubeflow-training") or () if each.name == f"{model}.py"]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "attribute_map":
            return set(ast.literal_eval(node.value).values())
    raise LookupError(model)


def test_an_indexed_job_with_its_service_and_configuration(manifests):
    found, notes = manifests("kubernetes")
    assert list(found) == ["ConfigMap", "Service", "Job"]
    for manifest in found.values():
        check(manifest)
        assert manifest["metadata"] == {"name": "tiny", "namespace": "train"}
    assert notes == ""
    spec = found["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod, name = spec["template"]["spec"], found["Service"]["metadata"]["name"]
    (container,) = pod["containers"]
    limits = {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32, "memory": "900Gi"}
    assert container["resources"] == {"requests": limits, "limits": limits}
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert pod["subdomain"] == name
    assert (variables["MASTER_ADDR"], variables["FI_PROVIDER"], variables["NCCL_DEBUG"]) == (
        f"{name}-0.{name}",
        "efa",
        "WARN",
    )
    assert container["command"][:3] == ["nxdt", "train", "/etc/nxdt/run.yaml"]


def test_the_configuration_in_the_map_is_the_run_that_was_checked(manifests, tmp_path, nxdt):
    found, _ = manifests("kubernetes", "trainer.max_steps=7")
    (tmp_path / "inside.yaml").write_text(found["ConfigMap"]["data"]["run.yaml"])
    shown = nxdt("config", "show", "inside.yaml")
    assert shown.returncode == 0, shown.stderr
    values = yaml.safe_load(shown.stdout)
    assert (values["trainer"]["max_steps"], values["trainer"]["num_nodes"], values["trainer"]["devices"]) == (7, 2, 8)


def test_a_mistake_ends_the_job_and_a_stop_does_not_count(manifests):
    rules = manifests("kubernetes")[0]["Job"]["spec"]["podFailurePolicy"]["rules"]
    actions = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules if "onExitCodes" in rule}
    assert actions == {2: "FailJob", 143: "Ignore"}


def test_a_train_job_of_kubeflow_trainer(manifests):
    trainer = pytest.importorskip("kubeflow_trainer_api.models", reason="make install brings it")
    found, notes = manifests("kubernetes", "--workload", "trainjob", "--compile")
    job = found["TrainJob"]
    read = trainer.TrainerV1alpha1TrainJob.from_dict(job)
    assert read.to_dict() == job
    assert (read.spec.trainer.num_nodes, read.spec.trainer.num_proc_per_node) == (2, 8)
    assert "torch-distributed" in notes
    command = job["spec"]["trainer"]["command"]
    assert command[:2] == ["/bin/sh", "-c"]
    assert command[2].index("nxdt_core compile") < command[2].index("exec torchrun -m nxdt_core train")
    (replicated,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    patched = replicated["template"]["spec"]["template"]["spec"]
    patched["containers"][0]["image"] = "of-the-runtime"
    check_pod(patched)


def test_a_py_torch_job_of_hyperpod_on_eks(manifests):
    found, _ = manifests("hyperpod", "--orchestrator", "eks", "--instance-type", "ml.p5.48xlarge")
    check(found["ConfigMap"])
    job = found["PyTorchJob"]
    assert job["metadata"]["annotations"]["sagemaker.amazonaws.com/enable-job-auto-resume"] == "true"
    assert set(job["spec"]) <= names("kubeflow_org_v1_py_torch_job_spec")
    assert set(job["spec"]["runPolicy"]) <= names("kubeflow_org_v1_run_policy")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    for each in replicas.values():
        assert set(each) <= names("kubeflow_org_v1_replica_spec")
        check_pod(each["template"]["spec"])
        selector = each["template"]["spec"]["nodeSelector"]
        assert selector == {"sagemaker.amazonaws.com/node-health-status": "Schedulable", "pool": "p5"}
        assert each["template"]["spec"]["containers"][0]["name"] == "pytorch"


def test_hyperpod_on_slurm_resumes_by_itself(nxdt, tmp_path):
    done = nxdt("launch", "hyperpod", "recipe:llama-tiny", "--nodes", "2", "-o", "out")
    assert done.returncode == 0, done.stderr
    assert (
        "srun --label --kill-on-bad-exit=0 --cpu-bind=none --auto-resume=1 "
        in (tmp_path / "out/job.sbatch").read_text()
    )


@pytest.mark.parametrize("wrong", ["completionMod", "containers"])
def test_the_validator_finds_what_is_wrong(manifests, wrong):
    job = manifests("kubernetes")[0]["Job"]
    if wrong == "containers":
        job["spec"]["template"]["spec"]["containers"][0]["env"][0]["vale"] = "x"
    else:
        job["spec"][wrong] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        check(job)


def test_what_a_pod_would_lose_is_noted(nxdt, tmp_path):
    done = nxdt("launch", "kubernetes", "recipe:llama-tiny", "--image", "i", "-o", "out")
    assert done.returncode == 0, done.stderr
    assert "The pods ask for no devices" in done.stderr
    assert "Checkpoints go to nxdt_experiments/" in done.stderr
