"""The control plane's actors."""

import logging

# RLlib warns of parts of itself that use others, and of its new defaults, in every process that imports it: nothing
# that a user could mend. What imports RLlib for us imports this package first.
for _name in ("ray._common.deprecation", "ray.rllib.algorithms.algorithm_config"):
    logging.getLogger(_name).setLevel(logging.ERROR)
