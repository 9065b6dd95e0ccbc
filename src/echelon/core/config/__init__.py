"""The configuration of a run: the keys of a job, their defaults, and how a job file is read.

    job.py         Job: the top-level keys, and the rules between sections
    sections.py    every section of a job
    loading.py     YAML with line numbers and overrides → a checked Job

Start with job.py.
"""

from echelon.core.config.job import Job
from echelon.core.config.loading import JobFile, job_from, load_job
from echelon.core.config.sections import (
    AugmentSection,
    Axis,
    CheckpointSection,
    ClipSection,
    DataSection,
    ElasticSection,
    EvaluateSection,
    HealthSection,
    MeritSection,
    OptimizerSection,
    ParameterServerSection,
    PipelineSection,
    ScheduleSection,
    Section,
    ShardedSection,
    StopSection,
    SyncSection,
    TensorSection,
    TrackSection,
)

__all__ = [
    "AugmentSection",
    "Axis",
    "CheckpointSection",
    "ClipSection",
    "DataSection",
    "ElasticSection",
    "EvaluateSection",
    "HealthSection",
    "Job",
    "JobFile",
    "MeritSection",
    "OptimizerSection",
    "ParameterServerSection",
    "PipelineSection",
    "ScheduleSection",
    "Section",
    "ShardedSection",
    "StopSection",
    "SyncSection",
    "TensorSection",
    "TrackSection",
    "job_from",
    "load_job",
]
