"""Engines train the trials of a study.

An *interval* is the `check_interval` optimizer steps up to a validation. An *attempt* is one
training of a trial; its `Attempt` records the validations and decides when it ends. A *run* is an
attempt with its network in the interval loop, the loop of lit_dps (`NetworkRun`). A *stack* trains
many runs at once, one a *row*.

The course of one trial, with the file of each step:

1. `lit_dps.study.workers.work` passes an `Attempt` at the trial to `TrialEngine.train`
   (`trial_engine`). The attempt has the goal, the cost at which a race stops it, and the step
   where it pauses.
2. `TrialEngine.choose` chooses the loop. `eligible` decides whether the trial can be stacked,
   trained as a single network, or needs Lightning's loop.
3. `build_trial` (`network_run`) builds the network and the data. `NetworkRun.build_or_resume`
   resumes the run from its checkpoint, and `NetworkRun.prune_unless_resumed` prunes the network of
   a new run. `StackFiller` (`stack_filler`) finds the attempts of a stack. On a GPU
   `stacked_scores` scores all its new networks at once.
4. `RunGroup.train_intervals` (`run_group`) trains the networks for `check_interval` steps, by
   `SingleNetwork` (`single_network`) or `StackedNetworks` (`stack`), both `NetworkRows`, and
   validates them. On a GPU a stack trains several such intervals before it validates the snapshots
   of the networks after each of them (`snapshots`).
5. `RunGroup.record` passes each validation to `Attempt.record` (`lit_dps.core.attempt`), which
   stores it in the curve and decides: the goal is met, the run diverged, its steps are spent, a
   race stops it (`lit_dps.core.racing`), it pauses, or it continues.
6. `RunGroup.end_interval` calls `raise_if_stopped`, which raises if the process is asked to stop.
   It saves checkpoints.
7. The engine yields `Attempt.result()`. The worker stores it.

If the memory of the device is insufficient, a stack is halved (`memory`,
`TrialEngine._train_runs`).

In Lightning's loop, `LightningLoop` (`lightning_loop`) calls `Trainer.fit`. Callbacks of
`lit_dps.training` take these steps: `PruningCallback` step 3, `GoalErrorCallback` steps 4 and 5,
`CheckpointCallback` step 6.

A stack also trains a LightningModule that is no `ImageClassifier`: `logged_module` calls its steps,
`loader_data` keeps its batches in memory, and `stackable_module` decides whether the results are
the same. The data x and y of a batch are then an `Examples` and the range of its rows.

Two files hold rules that `eligible` checks: `module_hooks` lists the hooks of a module that the
interval loop calls, and `stackable_update` compares the update of a stack with the optimizer's.
"""
