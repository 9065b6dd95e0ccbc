"""Tracking: the run store, the observers that fill it, progress, exporters and the HTML report.

Start with observers.py (who hears of a run), then store.py (where it is recorded) and
report/page.py (how it is shown). Tracking never changes training.
"""

from echelon.track.exporters import exporter
from echelon.track.observers import Behind, Observers, Recorder
from echelon.track.progress import progress
from echelon.track.records import Best, Event, Point, Run, Series
from echelon.track.report import try_report, write_report
from echelon.track.store import Store, StoreError

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
