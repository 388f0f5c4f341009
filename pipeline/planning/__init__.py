"""Planning: what every configuration would need, on cards that need not be here."""
