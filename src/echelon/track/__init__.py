"""What is known about runs: the store, the observers that fill it, progress and the report."""

from echelon.track.exporters import exporter
from echelon.track.observers import Behind, Observers, Recorder
from echelon.track.progress import progress
from echelon.track.report import try_report, write_report
from echelon.track.store import Best, Event, Point, Run, Series, Store, StoreError

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
