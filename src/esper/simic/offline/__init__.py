"""Learning from records: imitation and implicit Q-learning, without playing an episode."""
