"""What goes wrong in learning, named while it happens: measurements, alarms, profiles. Nothing here changes a run."""

from esper.simic.telemetry.alarms import Alarm, AlarmLimits, RoundFacts, Severity
from esper.simic.telemetry.catalogue import alarm_catalogue
from esper.simic.telemetry.detector import AnomalyDetector, DetectorState, DriftState, GradientEMATracker
from esper.simic.telemetry.examination import Detail, DetailLevel, DetailReport, Examination
from esper.simic.telemetry.gradients import (
    GradientFigures,
    GradientMonitor,
    GradientReport,
    collect_gradients,
    gradients_of,
    measure_gradients,
)
from esper.simic.telemetry.lstm import LstmHealth, compute_lstm_health, worst_health
from esper.simic.telemetry.observations import ColumnStatistics, observation_statistics
from esper.simic.telemetry.profiling import Spans, SpanTotal, check_trace, operator_trace
from esper.simic.telemetry.ratios import Offender, RatioExplosionDiagnostic, RatioLimits, RatioReport

__all__ = [
    "Alarm",
    "AlarmLimits",
    "AnomalyDetector",
    "ColumnStatistics",
    "Detail",
    "DetailLevel",
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
    "RatioLimits",
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
