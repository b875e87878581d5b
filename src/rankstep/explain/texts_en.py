"""The story in English."""

from __future__ import annotations

from typing import Final

TEXTS: Final = {
    # ------------------------------------------------------------ while the ranks are running
    "progress.start": "starting {ranks} ranks",
    "progress.job": "loading the job and trying one step of it",
    "progress.world": "the world",
    "progress.samples": "who gets which samples",
    "progress.gradients": "local gradients and the global one",
    "progress.drift": "without synchronisation, and with it",
    "progress.averaging": "averaging gradients against averaging weights",
    "progress.backward": "recording one backward",
    "progress.whatif": "other ways to reduce, with {tensors} small tensors too",
    "progress.steps": "optimizer steps on all ranks",
    "progress.nodes": "a second world, on two nodes",
    # ------------------------------------------------------------ the frame
    "title": "Data parallelism, told from a real run",
    "built_in": "the built-in digits model",
    "intro": (
        "{ranks} processes on this machine have just trained {job} for a few steps. Every number below was measured in "
        "that run; nothing is recited. Data parallelism solves one problem: let many devices compute gradients on "
        "different samples, and make them act like one process with a bigger batch."
    ),
    "chain": "the whole chain, with this run's numbers",
    "chain.dataset": "Dataset: {samples} samples",
    "chain.sampler": "DistributedSampler: every rank has samples of its own",
    "chain.samples": "{count} samples",
    "chain.batch": "DataLoader: a local batch of {batch} samples on each rank, {total} in the global batch",
    "chain.loss": "forward: every rank has its own loss",
    "chain.ready": "backward: {tensors} gradients, ready one after another",
    "chain.bucket": "hooks fill {buckets} buckets",
    "chain.reduce": "all-reduce: {all_reduces} of them, {early} while backward was still running",
    "chain.mean": "the same gradient on every rank: the mean, |g| = {length}",
    "chain.step": "optimizer.step(): {optimizer} on every rank by itself",
    "chain.equal": "the weights of all ranks have {checksums} checksum",
    "rank": "rank",
    "held": "holds",
    "failed": "DOES NOT HOLD",
    "verdict": "{word}: {claim}",
    "separator": "; ",
    "colon": ": ",
    "times": "x",
    "because": "because {cause}",
    # ------------------------------------------------------------ 1 the world
    "world.title": "1. The world: one rank is one process with the whole model",
    "world.ranks": (
        "`world_size` is {ranks}: so many processes train. `rank` numbers them all, `local_rank` those of one node, and "
        "which device a process takes is its local_rank's affair. All of these ranks are on {nodes} node, so here the two "
        "numbers are the same."
    ),
    "world.node": "node",
    "world.device": "device",
    "world.pid": "process",
    "world.model": "model",
    "world.gradient": "gradient",
    "world.state": "{optimizer} state",
    "world.before": "before wrapping",
    "world.after": "after wrapping",
    "world.digests": "checksum of the weights on rank 0, 1, 2, ...",
    "world.second": (
        "On several nodes they differ. That was tried out as well: {nodes} launchers were started on this machine, each "
        "told that it is a node with {each} ranks, exactly as one starts them on {nodes} machines. Their ranks met in a "
        "world of their own, and each told all others where it stood:"
    ),
    "world.boxes": "the second world: rank = node x {each} + local_rank",
    "world.numbers": (
        "`local_rank` 0 is there {nodes} times, `rank` 0 once among {world_size}: which device to use is a question for "
        "local_rank, who somebody is one for rank."
    ),
    "world.no_second": "A second world on two nodes was to show how they differ, but it did not start: {problem}",
    "world.whole": (
        "{model} has {parameters} parameters in {tensors} tensors: {bytes}, and every rank holds all of it: {total} on "
        "{ranks} ranks. It is replicated, not sharded; a shard would be {shard}. Each rank also has a gradient of "
        "{gradient} and {optimizer} state of {state} of its own. A model that does not fit into one device does not "
        "fit here either: that is what FSDP and ZeRO are for."
    ),
    "world.copied": (
        "The ranks were given different weights on purpose: {before} different checksums. Wrapping the model copied rank "
        "0's weights to all, and {after} was left. From here on all start from the same point."
    ),
    # ------------------------------------------------------------ 2 the samples
    "samples.title": "2. The samples: who gets which",
    "samples.roles": (
        "The wrapper does not deal samples. `DistributedSampler` says which samples belong to which rank; the DataLoader "
        "makes batches of them. Here it deals {samples} samples to {ranks} ranks."
    ),
    "samples.cut": (
        "The dataset has {samples} samples; what follows deals the first {counted} of them."
    ),
    "samples.map": "which rank gets sample 0, 1, 2, ... {last}",
    "samples.epoch": "epoch {epoch}",
    "samples.count": "samples",
    "samples.first": "first of epoch 0",
    "samples.forgotten": "epoch 1, no set_epoch",
    "samples.next": "epoch 1, set_epoch(1)",
    "samples.proof": (
        'The proof, counted over all ranks to the end of the epoch: with `pad="none"` every sample was dealt at least '
        "{least} and at most {most} time, {dealt} in all. By default every rank gets equally many, {share}, so that all "
        "take equally many steps; {twice} samples from the front of the order fill the last places and are dealt twice."
    ),
    "samples.without": (
        "Without a sampler each rank would read all {samples} samples: {reads} reads, and every sample {ranks} times for "
        "the gradient that one process has already. That is repetition, not data parallelism."
    ),
    "samples.set_epoch": (
        "`set_epoch` gives each epoch its own order, the same one on all ranks. Without it, {same} of {places} places of "
        'rank 0 held the same sample again in the next epoch; with it, {changed}. Rankstep says so: "{warning}"'
    ),
    # ------------------------------------------------------------ 3 gradients
    "gradients.title": "3. Local gradients, and the global one",
    "gradients.local": (
        "Each rank took {batch} samples D_i, so the global batch has {ranks} x {batch} = {total}. Each computed its own "
        "loss L_i and gradient g_i. The samples differ, so the gradients do: they point {smallest} to {largest} degrees "
        "away from each other."
    ),
    "gradients.loss": "loss L_i",
    "gradients.length": "length |g_i|",
    "gradients.angle": "angle to the mean",
    "gradients.element": "element {name}",
    "gradients.mean": "mean of g_i",
    "gradients.one": "one process",
    "gradients.wrapper": "after backward()",
    "gradients.equal": (
        "What is wanted is the gradient of the whole global batch. Rank 0 computed it alone, as one process with all {total} "
        "samples. The mean g = (g_0 + ... + g_{last}) / {ranks}, by a real all-reduce, differs from it by {difference} "
        "of its length; what the wrapper left in `.grad` on every rank, by {wrapper}. In the last column you can check one "
        "number by hand."
    ),
    "gradients.rounding": (
        "That difference is rounding: a sum of float numbers taken in another order. N ranks act as one process."
    ),
    "gradients.differs": (
        "For this model that is more than rounding: N ranks do not act as one process. The cause is below."
    ),
    "gradients.angle_of": "{degrees} deg",
    "gradients.uneven": (
        "When local batches differ ({sizes} samples), the mean of the ranks' means gives a sample of a small batch more "
        "weight than one of a big batch: it is off by {plain}. `model.backward(loss_sum, count=n)` lets the counts "
        "travel with the last bucket and divides by their sum: off by {exact}."
    ),
    "gradients.uneven_plain": "mean of means",
    "gradients.uneven_exact": "backward(loss_sum, count=n)",
    "gradients.off": "off from one process",
    "gradients.picture": "the local gradients and their mean: lengths, and angles to the mean, as measured",
    # ------------------------------------------------------------ 4 drift
    "drift.title": "4. Why gradients must be synchronised",
    "drift.story": (
        "Two sets of copies began with the same weights and took the same samples in {steps} steps of SGD. In one set "
        "each rank stepped with its own gradient: after the first step there were {first} different models, and in each "
        "later step each rank computed its gradient at another point. In the other set the gradients were averaged."
    ),
    "drift.apart": "distance from rank 0 to the farthest rank, as a share of the weights' length",
    "drift.alone": "not synchronised",
    "drift.with": "synchronised",
    "drift.step": "step {step}",
    "drift.together": (
        "After {steps} steps: {apart} apart without synchronisation ({share} of the weights' length). With it: {together}, "
        "and after each step the checksums of all ranks were equal, bit for bit."
    ),
    "drift.parted": (
        "After {steps} steps: {apart} apart without synchronisation ({share} of the weights' length). With it they should be "
        "equal, bit for bit; they are {together} apart."
    ),
    # ------------------------------------------------------------ 5 averaging
    "averaging.title": "5. Why gradients, and not parameters",
    "averaging.story": (
        "One could let every rank step first and average the weights then. Both were run for {steps} steps from the same "
        "weights on the same samples. The table says how far the results are apart, as a share of the way that the weights "
        "went; the last column, how far the ranks' optimizer states are apart in the end."
    ),
    "averaging.optimizer": "optimizer",
    "averaging.each": "weights averaged each step",
    "averaging.few": "every {every} steps",
    "averaging.states": "states apart",
    "averaging.no_state": "no state",
    "averaging.linear": (
        "A step of SGD, with momentum too, is linear in the gradient, so averaging after each step gives the same weights "
        "but for rounding. But look at the states: every rank keeps a momentum of its own gradients, so a checkpoint of one "
        "rank is no longer the state of all; and as soon as averaging is rarer than each step, SGD differs as well."
    ),
    "averaging.adaptive": (
        "Adam and AdamW divide by a root of squared gradients. The mean of such steps is not the step of the mean: after "
        "{steps} steps the results are {adam} and {adamw} of the way apart. Averaged gradients need none of these cares: equal "
        "gradients into equal states make equal steps, for every optimizer."
    ),
    # ------------------------------------------------------------ 6 backward
    "backward.title": "6. One backward as it happened",
    "backward.story": (
        "Backward does not produce all gradients at once: it runs through the graph from the loss to the input, and one "
        "parameter after another is ready. A hook on each parameter counts its bucket down; a full bucket leaves at once, "
        "while backward goes on. {recorded} steps were recorded on every rank; this is the "
        "quickest of them."
    ),
    "backward.lane_forward": "forward",
    "backward.lane_backward": "backward",
    "backward.lane_ready": "ready",
    "backward.lane_bucket": "bucket {bucket}",
    "backward.lane_step": "step",
    "backward.legend": (
        "{forward} forward   {compute} backward, up to the last gradient   {wait} waiting for buckets   {tick} a gradient is ready   "
        "{flight} a bucket is in flight   {step} optimizer step"
    ),
    "backward.of_rank": "rank {rank}",
    "backward.order": "the order in which gradients became ready on rank 0; times in milliseconds",
    "backward.parameter": "parameter",
    "backward.bucket": "bucket",
    "backward.ready_at": "ready at",
    "backward.left_at": "its bucket left at",
    "backward.back_at": "came back at",
    "backward.more": "... and {count} more",
    "backward.overlap": (
        "{buckets} buckets, each full at {cap}, carried {tensors} gradients in {all_reduces} all-reduces; {early} of them left "
        "before backward had ended, the last one with it. On rank 0 buckets were in flight for {flight}, and {hidden} of that "
        "({share}) was hidden: the rank was computing gradients meanwhile."
    ),
    "backward.hidden": (
        "Hidden means: in flight before the last gradient was ready. {ranks} processes share {cores} cores here, and gradients "
        "took {compute} to compute: the longer that takes, the more can be hidden behind it."
    ),
    # ------------------------------------------------------------ 7 what if
    "whatif.title": "7. What if it were done otherwise",
    "whatif.job": (
        "One backward of this model ({tensors} tensors, {bytes}), reduced in four ways, each run {repeats} times in turn: "
        "medians over the runs, each taken on the slowest rank. All went the same way from rank to rank: {way}."
    ),
    "whatif.many": (
        "And a model of {tensors} tensors of {elements} number each ({bytes}), so that an all-reduce has next to nothing "
        "to carry, and what is measured is its start. The bucketed ways are medians of {repeats} runs; one all-reduce per "
        "tensor was run once."
    ),
    "whatif.whole": (
        "All {run} all-reduces were really run, one after another: {each} for each, and {slower} times as long in all as the "
        "plan with its {all_reduces}. Each one pays its own start."
    ),
    "whatif.cut": (
        "There was no time for all {tensors}: {run} all-reduces were run, one after another, and the table has the time of "
        "these. That is {each} for each, and {slower} times as long as the plan took for all {tensors} tensors with "
        "its {all_reduces}. Each one pays its own start. `--seconds` gives them more time."
    ),
    "whatif.shared": "shared memory",
    "whatif.way": "way",
    "whatif.count": "all-reduces",
    "whatif.time": "milliseconds",
    "whatif.spread": "least to most",
    "whatif.per_parameter": "one all-reduce per parameter",
    "whatif.after_backward": "buckets, but only after backward",
    "whatif.one_bucket": "one big bucket",
    "whatif.plan": "buckets as planned",
    "whatif.reading": (
        "One big bucket has the fewest starts but cannot leave before the last gradient is "
        "there, so nothing is hidden. Buckets are the middle: few starts, and most of them early. On a shared machine and "
        "with a small model the times of the last three may change places; the counts do not."
    ),
    # ------------------------------------------------------------ 8 steps
    "steps.title": "8. Every rank makes its own optimizer step",
    "steps.story": (
        "{steps} steps of {optimizer} on the wrapped model. No rank sent weights to another: each stepped alone, with equal "
        "gradients and equal state. After each step the SHA-256 of all weights was compared."
    ),
    "steps.step": "step",
    "steps.loss": "mean loss",
    "steps.checksums": "different checksums",
    "steps.one_loss": "one process",
    "steps.weights": "checksum of the weights on rank 0, 1, 2, ...",
    "steps.last": "after the last step",
    "steps.one": (
        "One process that took the same global batches alone ended {apart} of the way apart from the {ranks} ranks."
    ),
    "steps.rounding": "It is the same training, but for rounding that the optimizer may enlarge.",
    "steps.differs": "That is no wonder: in part 3 its gradient was another one already.",
    # ------------------------------------------------------------ the claims
    "claims.all": "{count} claims, all held. {seconds} s.",
    "claims.some": "{failed} of {count} claims did not hold: {names}. {seconds} s.",
    "claim.world.rank": "rank = node x ranks per node + local_rank, on one node and on two",
    "claim.world.whole": "every rank holds the whole model",
    "claim.world.copied": "wrapping makes all ranks start from rank 0's weights",
    "claim.samples.once": "every sample is dealt exactly once",
    "claim.samples.padded": "by default all ranks get equally many samples, and none is left out",
    "claim.samples.set_epoch": "set_epoch changes the order, and without it the order repeats",
    "claim.gradients.mean": "the mean of the local gradients is the gradient of one process",
    "claim.gradients.wrapper": "backward() leaves that gradient on every rank",
    "claim.gradients.uneven": "with counts it is exact for uneven batches too",
    "claim.drift.alone": "without synchronisation the ranks' weights part",
    "claim.drift.together": "with it they stay equal, bit for bit",
    "claim.averaging.sgd": "for SGD, averaging weights after each step comes to the same",
    "claim.averaging.momentum": "for SGD with momentum too, in the weights",
    "claim.averaging.adam": "for Adam it does not",
    "claim.averaging.adamw": "for AdamW it does not",
    "claim.backward.once": "every gradient is ready once",
    "claim.backward.filled": "no bucket leaves before its last gradient is ready",
    "claim.backward.order": "buckets leave in the same order on every rank",
    "claim.backward.count": "one all-reduce per bucket, and no other",
    "claim.whatif.count": "buckets need far fewer all-reduces than parameters",
    "claim.whatif.same": "all ways leave the same gradient",
    "claim.steps.weights": "after every step all ranks hold the same weights",
    "claim.steps.state": "and the same optimizer state",
    # ------------------------------------------------------------ why a claim did not hold
    "cause.batch_statistics": (
        "the model normalises with the statistics of its own batch, which is smaller on a rank than in one process: "
        "{modules}. torch.nn.SyncBatchNorm or a norm without batch statistics removes this"
    ),
    "cause.draws": (
        "the model draws random numbers, and {ranks} ranks draw others than one process: {modules}. In eval() mode the "
        "gradients are equal"
    ),
    "cause.training_mode": (
        "the model computes otherwise in train() mode than in eval() mode, where the gradients are equal: something in it draws "
        "random numbers or looks at the whole batch"
    ),
    "cause.loss_no_mean": (
        "the loss is no mean over samples: one process has {one_process}, the mean of the ranks is {mean_of_ranks}. A sum, or a "
        "mean over tokens or pixels, needs model.backward(loss_sum, count=n); where the samples of a batch influence each "
        "other, as in a contrastive loss, they have to be gathered first"
    ),
    "cause.arithmetic": (
        "loss and mode are not to blame: the model computes in a lower precision than its weights have (autocast), or the samples "
        "of a batch influence each other"
    ),
    "cause.not_finite": "a loss, gradient or weight was NaN or infinite",
    "cause.no_second_world": "the launchers of the second world did not bring it about: {said}",
    "cause.equal_gradients": (
        "all ranks had the same gradient, as from equal samples: then nothing parts them, and averaging changes nothing"
    ),
    "cause.coarse_weights": "the weights have so few digits that rounding alone could make a difference like this one",
    "cause.unknown": "of something that explain does not know; `rankstep check` looks closer",
}
