"""The core's launchers: the local agent, joined processes, Slurm, Kubernetes and SageMaker HyperPod."""
