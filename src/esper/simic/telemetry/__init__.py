"""Measures training, raises alarms and profiles, without changing a run."""

from esper.simic.telemetry.alarms import Alarm, AlarmLimits, RoundFacts, Severity
from esper.simic.telemetry.detector import AnomalyDetector, Detail, DetectorState, DriftState, GradientEMATracker
from esper.simic.telemetry.examination import (
    ColumnStatistics,
    DetailReport,
    Examination,
    Offender,
    RatioExplosionDiagnostic,
    RatioReport,
    observation_statistics,
)
from esper.simic.telemetry.measurements import (
    GradientFigures,
    GradientMonitor,
    GradientReport,
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
    "ColumnStatistics",
    "Detail",
    "DetailReport",
    "DetectorState",
    "DriftState",
    "Examination",
    "GradientEMATracker",
    "GradientFigures",
    "GradientMonitor",
    "GradientReport",
    "LstmHealth",
    "Offender",
    "RatioExplosionDiagnostic",
    "RatioReport",
    "RoundFacts",
    "Severity",
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
