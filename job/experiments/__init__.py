"""The ready-made jobs. gpufleet asks a job's config everything that it needs to know about the job; this table alone
names the configs.
"""

CONFIGS = {  # the module and the class of a job's parameters, by the job's name
    "tinystories-growth": "gpufleet.job.experiments.growth.spec:GrowthConfig",
    "sft-h100": "gpufleet.job.experiments.sft.spec:SftConfig",
    "pretrain-d64": "gpufleet.job.experiments.pretrain.spec:PretrainConfig",
    "kernel-sft": "gpufleet.job.experiments.kernel.spec:KernelConfig",
    "two-tower": "gpufleet.job.experiments.two_tower.spec:TwoTowerConfig",
}
