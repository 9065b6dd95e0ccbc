"""What is known about runs: the store, the observers that fill it, progress and the report."""

from echelon.track.behind import Behind
from echelon.track.exporters import exporter
from echelon.track.observers import Observers
from echelon.track.progress import progress
from echelon.track.recorder import Recorder
from echelon.track.records import Best, Event, Point, Run, Series
from echelon.track.report import try_report, write_report
from echelon.track.schema import StoreError
from echelon.track.store import Store

__all__ = [
    "Behind",
    "Best",
    "Event",
    "Observers",
    "Point",
    "Recorder",
    "Run",
    "Series",
    "Store",
    "StoreError",
    "exporter",
    "progress",
    "try_report",
    "write_report",
]
