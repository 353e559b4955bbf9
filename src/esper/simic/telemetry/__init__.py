"""Measures training, raises alarms and profiles, without changing a run."""

from esper.simic.telemetry.alarms import Alarm, AlarmLimits, RoundFacts
from esper.simic.telemetry.detector import AnomalyDetector, Detail, DetectorState, GradientEMATracker
from esper.simic.telemetry.examination import (
    DetailReport,
    Examination,
    RatioExplosionDiagnostic,
    observation_statistics,
)
from esper.simic.telemetry.measurements import (
    GradientMonitor,
    LstmHealth,
    collect_gradients,
    compute_lstm_health,
    gradients_of,
    measure_gradients,
    worst_health,
)
from esper.simic.telemetry.profiling import Spans, SpanTotal, check_trace, operator_trace
from esper.simic.telemetry.rules import alarm_catalogue

__all__ = [
    "Alarm",
    "AlarmLimits",
    "AnomalyDetector",
    "Detail",
    "DetailReport",
    "DetectorState",
    "Examination",
    "GradientEMATracker",
    "GradientMonitor",
    "LstmHealth",
    "RatioExplosionDiagnostic",
    "RoundFacts",
    "SpanTotal",
    "Spans",
    "alarm_catalogue",
    "check_trace",
    "collect_gradients",
    "compute_lstm_health",
    "gradients_of",
    "measure_gradients",
    "observation_statistics",
    "operator_trace",
    "worst_health",
]
