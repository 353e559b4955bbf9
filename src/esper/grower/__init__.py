"""Growth of any model in its user's own training loop."""

from esper.grower.grower import Grower
from esper.grower.records import Action, GrowthRecord, GrowthReport, Offer
from esper.grower.waiting import expect_seeds, hidden_seeds

__all__ = ["Action", "Grower", "GrowthRecord", "GrowthReport", "Offer", "expect_seeds", "hidden_seeds"]
