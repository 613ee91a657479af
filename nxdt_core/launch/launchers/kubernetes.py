"""Kubernetes: a pod for each node, as a plain indexed Job, a TrainJob of Kubeflow Trainer, or a PyTorchJob.

The pods of an indexed Job start ``nxdt train``, which starts the processes of the node. Those of Kubeflow's objects
start ``torchrun``, which reads the variables that the operator sets.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from nxdt_core.errors.launch import LauncherNeedsOption
from nxdt_core.launch.launchers.config import KubernetesOptions, header, instance_of, program
from nxdt_core.protocols.launcher import Job, Launcher, Submission

MANIFEST = "job.yaml"
_CONFIG_PATH = "/etc/nxdt"
_EFA = "vpc.amazonaws.com/efa"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_MISTAKE, _STOPPED = 2, 143
"""Exit statuses of a run: a restart would repeat the first; the second has saved a checkpoint."""

_Object = dict[str, Any]


class KubernetesLauncher(Launcher):
    """Launcher that writes manifests for ``kubectl``."""

    def submission(self, job: Job, options: KubernetesOptions) -> Submission:
        """Return the manifests of a job, in one file."""
        return manifests(job, options, launcher="kubernetes")


def manifests(
    job: Job, options: KubernetesOptions, *, launcher: str, annotations: Mapping[str, str] | None = None
) -> Submission:
    """Return the file of the objects of a job, which has ``annotations``; errors name the ``launcher``.

    Raises:
        LauncherNeedsOption: there is no image.
    """
    if options.image is None:
        raise LauncherNeedsOption(launcher=launcher, option="image", reason="pods run containers")
    metadata: _Object = {"name": job.name}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    objects: list[_Object] = []
    if job.config_path is not None:
        data = {"run.yaml": _text(dict(job.config))}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    if options.workload == "job":  # the names of the pods: node 0 is ``NAME-0.NAME``
        objects.append(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": metadata,
                "spec": {
                    "clusterIP": "None",
                    "publishNotReadyAddresses": True,
                    "selector": {"batch.kubernetes.io/job-name": job.name},
                    "ports": [{"name": "rendezvous", "port": options.port}],
                },
            }
        )
    workload = {"job": _indexed_job, "trainjob": _train_job, "pytorchjob": _pytorch_job}[options.workload]
    objects.append(workload(job, {**metadata, **({"annotations": dict(annotations)} if annotations else {})}, options))
    texts = [_text(manifest) for manifest in objects]
    notes = []  # what the objects alone do not ensure
    if options.workload == "trainjob":
        notes.append(f"The cluster must have the ClusterTrainingRuntime {options.runtime!r} of Kubeflow Trainer.")
    if not _limits(job, options).keys() - {"memory"}:
        notes.append("The pods ask for no devices: set --instance-type or --device-resource.")
    inside = [*options.claims.values(), *(mount.rpartition(":")[2] for mount in options.mounts)]
    mounted = any(job.checkpoints.startswith(f"{path.rstrip('/')}/") for path in inside)
    if not mounted and "://" not in job.checkpoints:
        lost = f"Checkpoints go to {job.checkpoints}, which is lost with a pod"
        notes.append(f"{lost}: let --claims or --mounts cover it.")
    text = "\n".join([*header(job), "---\n".join(["", *texts])])
    return Submission(files={MANIFEST: text}, command=("kubectl", "apply", "-f", MANIFEST), notes=tuple(notes))


def _text(value: _Object) -> str:
    """Return YAML that writes what several objects share in each of them: anchors are hard to read."""
    text: str = yaml.safe_dump(json.loads(json.dumps(value)), sort_keys=False, width=120)
    return text


def _indexed_job(job: Job, metadata: _Object, options: KubernetesOptions) -> _Object:
    variables: list[_Object] = [
        {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "MASTER_ADDR", "value": f"{job.name}-0.{job.name}"},
        {"name": "MASTER_PORT", "value": str(options.port)},
    ]
    container = _container(job, options, variables)
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "nxdt", "operator": "In", "values": [_MISTAKE]}},
        {"action": "Ignore", "onExitCodes": {"containerName": "nxdt", "operator": "In", "values": [_STOPPED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": options.max_restarts * job.nodes,
            "podFailurePolicy": {"rules": rules},
            "template": {
                "metadata": {"labels": {"app.kubernetes.io/name": "nxdt", "app.kubernetes.io/instance": job.name}},
                "spec": {"restartPolicy": "Never", "subdomain": job.name, **pod_spec(job, options, [container])},
            },
        },
    }


def _train_job(job: Job, metadata: _Object, options: KubernetesOptions) -> _Object:
    container = _container(job, options, [], torchrun=True)
    trainer = {
        "image": options.image,
        "command": container["command"],
        "numNodes": job.nodes,
        "numProcPerNode": job.devices,
        "resourcesPerNode": container.get("resources", {}),
        "env": container["env"],
    }
    patched = pod_spec(job, options, [{"name": "node", "volumeMounts": container["volumeMounts"]}])
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": patched}}}}
    patch = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"name": options.runtime},
            "trainer": {name: value for name, value in trainer.items() if value not in ({}, [])},
            "runtimePatches": [{"manager": "nxdt.io/launch", "trainingRuntimeSpec": patch}],
        },
    }


def _pytorch_job(job: Job, metadata: _Object, options: KubernetesOptions) -> _Object:
    container = {**_container(job, options, [], torchrun=True), "name": "pytorch"}

    def replicas(count: int) -> _Object:
        template = {"spec": pod_spec(job, options, [container])}
        return {"replicas": count, "restartPolicy": "OnFailure", "template": template}

    workers = {"Worker": replicas(job.nodes - 1)} if job.nodes > 1 else {}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(job.devices),
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": options.max_restarts * job.nodes},
            "pytorchReplicaSpecs": {"Master": replicas(1), **workers},
        },
    }


def pod_spec(job: Job, options: KubernetesOptions, containers: list[_Object]) -> _Object:
    """Return what the pods of all kinds of objects have: containers, volumes, and where they run."""
    volumes: list[_Object] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}
    ]
    if job.config_path is not None:
        volumes.append({"name": "config", "configMap": {"name": job.name}})
    for number, claim in enumerate(options.claims):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
    for number, mount in enumerate(options.mounts):
        volumes.append({"name": f"host-{number}", "hostPath": {"path": mount.partition(":")[0]}})
    spec: _Object = {"terminationGracePeriodSeconds": options.grace_s, "containers": containers, "volumes": volumes}
    if options.service_account is not None:
        spec["serviceAccountName"] = options.service_account
    if options.node_selector:
        spec["nodeSelector"] = dict(options.node_selector)
    return spec


def _container(job: Job, options: KubernetesOptions, variables: list[_Object], *, torchrun: bool = False) -> _Object:
    extra = [{"name": name, "value": value} for name, value in options.variables().items()]
    mounts: list[_Object] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if job.config_path is not None:
        mounts.append({"name": "config", "mountPath": _CONFIG_PATH, "readOnly": True})
    for number, path in enumerate(options.claims.values()):
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    for number, mount in enumerate(options.mounts):
        host, _, inside = mount.partition(":")
        mounts.append({"name": f"host-{number}", "mountPath": inside or host})
    words = program(options, module=torchrun)
    command = [*words, *_placed(job, job.train)]
    if job.compile:
        first = shlex.join([*words, *_placed(job, job.compile)])
        command = ["/bin/sh", "-c", f"{first} && exec {shlex.join(command)}"]
    container: _Object = {"name": "nxdt", "image": options.image, "command": command}
    container["env"] = [*variables, *extra]
    limits = _limits(job, options)
    if limits:
        container["resources"] = {"requests": limits, "limits": limits}
    container["volumeMounts"] = mounts
    return container


def _placed(job: Job, arguments: tuple[str, ...]) -> list[str]:
    """Name the configuration as pods see it: the resolved one, with the overrides in it."""
    if job.config_path is None:
        return list(arguments)
    overrides = [word for word in arguments[2:] if word.startswith("checkpoint.resume_")]
    return [arguments[0], f"{_CONFIG_PATH}/run.yaml", *overrides]


def _limits(job: Job, options: KubernetesOptions) -> dict[str, str | int]:
    limits: dict[str, str | int] = {}
    instance = instance_of(options.instance_type)
    resource = options.device_resource or (instance.resource if instance else None)
    if resource is not None:
        whole = instance is not None and resource == instance.resource and job.devices == instance.devices
        limits[resource] = instance.resources if instance is not None and whole else job.devices
    if options.efa_interfaces:
        limits[_EFA] = options.efa_interfaces
    if options.memory is not None:
        limits["memory"] = options.memory
    return limits
