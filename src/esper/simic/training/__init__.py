"""Learning to decide: rounds of hosts in lockstep, and the update of the policy that grows them."""
