"""Config models: what a job may say."""

from echelon.core.config.base import Section
from echelon.core.config.data import AugmentSection, DataSection
from echelon.core.config.elastic import ElasticSection
from echelon.core.config.job import Job
from echelon.core.config.load import JobFile, job_from, load_job
from echelon.core.config.optim import ClipSection, OptimizerSection, ScheduleSection
from echelon.core.config.parallel import (
    Axis,
    PipelineSection,
    ShardedSection,
    SyncSection,
    TensorSection,
)
from echelon.core.config.running import (
    CheckpointSection,
    EvaluateSection,
    HealthSection,
    StopSection,
    TrackSection,
)
from echelon.core.config.server import MeritSection, ParameterServerSection

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
