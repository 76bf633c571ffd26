"""Explorl's strategies inside verl, on Ray.

    trainer.v1.trainer_mode=explorl
    explorl:
      strategies: [ppl_shaping, {egsw: {alpha: 0.3}}]

verl's driver holds the whole batch of a step; there the strategies act on it, and what they say of each token travels
with its row to verl's workers. Modules, in the order of the data:

    settings    the section `explorl` of verl's configuration
    support     which strategies run inside verl, and why the others do not
    check       what a configuration asks for and cannot have, said before Ray starts
    sampling    what strategies say of each row's sampling, for verl's agent loops (agent_loop)
    rows        the rows of a step as verl's driver holds them
    batch       from these to the `Batch` that strategies see, and back
    loss        verl's clipped loss with bounds, weights and penalties of each token (policy_loss)
    trainer     verl's synchronous trainer with all of this
    memory      what strategies remember, beside verl's checkpoints
    recording   a run's folder, for `explorl report`
    plugin      what verl loads

`agent_loop`, `policy_loss`, `trainer` and `plugin` import verl; the others need none.
"""

from explorl.integrations.verl.support import support

__all__ = ["support"]
