"""Growth of any model in its user's own training loop."""

from esper.grower.grower import Grower
from esper.grower.records import Action, GrowthRecord, GrowthReport, Offer

__all__ = ["Action", "Grower", "GrowthRecord", "GrowthReport", "Offer"]
