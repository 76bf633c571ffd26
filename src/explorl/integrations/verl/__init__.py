"""Explorl's strategies inside verl, on Ray.

    trainer.v1.trainer_mode=explorl
    explorl:
      strategies: [ppl_shaping, {egsw: {alpha: 0.3}}]

verl's driver holds the whole batch of a step. The strategies process it there, and their per-token results are sent to
verl's workers as columns of the batch. Modules, in the order of the data:

    settings          the section `explorl` of verl's configuration
    support           which strategies run inside verl, and why others do not
    check             errors for unsupported configurations, raised before Ray starts
    sampling_params   the strategies' sampling parameters of each row, for verl's agent loops (agent_loop)
    step_rows         the rows of a step as verl's driver holds them
    conversion        from these rows to the strategies' `Batch`, and back
    token_loss        verl's clipped loss with bounds, weights and penalties per token (policy_loss)
    trainer           verl's synchronous trainer with all of this
    memory            the strategies' memory, saved with verl's checkpoints
    run_folder        a run's folder, for `explorl report`
    plugin            the entry point that verl loads

`agent_loop`, `policy_loss`, `trainer` and `plugin` import verl; the others do not.
"""

from explorl.integrations.verl.support import support

__all__ = ["support"]
