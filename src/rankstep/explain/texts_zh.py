"""The story in Chinese, in the words of the field."""

# ruff: noqa: RUF001 - full-width punctuation is what Chinese is written with

from __future__ import annotations

from typing import Final

TEXTS: Final = {
    # ------------------------------------------------------------ while the ranks are running
    "progress.start": "正在启动 {ranks} 个 rank",
    "progress.job": "加载任务，先试跑一步",
    "progress.world": "rank 与模型副本",
    "progress.samples": "数据如何分发",
    "progress.gradients": "local gradient 与 global gradient",
    "progress.drift": "同步与不同步",
    "progress.averaging": "平均 gradient 与平均参数",
    "progress.backward": "记录一次 backward",
    "progress.whatif": "换几种方式做 AllReduce，包括 {tensors} 个小 tensor 的模型",
    "progress.steps": "各 rank 执行 optimizer.step()",
    "progress.nodes": "再启动两个节点",
    # ------------------------------------------------------------ the frame
    "title": "用一次真实的运行讲清楚 DDP",
    "built_in": "内置的手写数字模型",
    "intro": (
        "就在刚才，这台机器上的 {ranks} 个进程把{job}训练了几步。下面的每一个数字都是在这次运行中实测的，没有一个是照抄来的。"
        "DDP 解决的核心问题非常直接：让多个设备分别计算不同数据上的 gradient，再把这些 gradient 同步起来，"
        "使它们像一个进程在更大的 batch 上训练那样更新同一个模型。"
    ),
    "chain": "一个完整的训练 step，配上这次运行的数字",
    "chain.dataset": "Dataset：{samples} 个样本",
    "chain.sampler": "DistributedSampler：每个 rank 拿到不同的样本",
    "chain.samples": "{count} 个样本",
    "chain.batch": "DataLoader：每个 rank 的 local batch 为 {batch} 个样本，global batch 共 {total} 个",
    "chain.loss": "Forward：每个 rank 算出自己的 loss",
    "chain.ready": "Backward：{tensors} 个 gradient 陆续 ready",
    "chain.bucket": "Hook：把 gradient 装进 {buckets} 个 bucket",
    "chain.reduce": "AllReduce：共 {all_reduces} 次，其中 {early} 次发出时 backward 还在进行",
    "chain.mean": "所有 rank 得到相同的 global gradient，即均值：|g| = {length}",
    "chain.step": "optimizer.step()：每个 rank 各自用 {optimizer} 更新",
    "chain.equal": "所有 rank 的参数保持一致：校验和只有 {checksums} 种",
    "rank": "rank",
    "held": "成立",
    "failed": "不成立",
    "verdict": "{word}：{claim}",
    "separator": "；",
    "colon": "：",
    "times": "×",
    "because": "原因：{cause}",
    # ------------------------------------------------------------ 1 the world
    "world.title": "1. 基本架构：一个 rank 就是一个训练进程，各有一份完整模型",
    "world.ranks": (
        "`world_size` = {ranks}，即参与训练的进程总数。`rank` 是全局唯一的进程编号；`local_rank` 是当前节点内部的编号，"
        "进程用哪个设备就由它决定。这些 rank 都在 {nodes} 个节点上，所以这里两个编号恰好相同。"
    ),
    "world.node": "节点",
    "world.device": "设备",
    "world.pid": "进程号",
    "world.model": "模型",
    "world.gradient": "gradient",
    "world.state": "{optimizer} state",
    "world.before": "DDP 包装之前",
    "world.after": "DDP 包装之后",
    "world.digests": "rank 0、1、2 …… 上参数的校验和",
    "world.second": (
        "有了多个节点，两个编号就不同了。这一点也实际跑了一遍：在这台机器上启动 {nodes} 个 launcher，每个 launcher 当作一个节点，"
        "各管 {each} 个 rank，与在 {nodes} 台机器上启动的方法完全一样。这些 rank 组成了另一个训练集群，并互相通报了自己的位置："
    ),
    "world.boxes": "第二个集群：rank = 节点 × {each} + local_rank",
    "world.numbers": (
        "`local_rank` 0 出现了 {nodes} 次，而 `rank` 0 在全部 {world_size} 个进程中只有一个：用哪个设备，看 local_rank；"
        "是哪个进程，看 rank。"
    ),
    "world.no_second": "本来还要用两个节点来说明二者的区别，但第二个集群没能启动：{problem}",
    "world.whole": (
        "{model} 共有 {parameters} 个参数，分布在 {tensors} 个 tensor 里，合计 {bytes}。每个 rank 都持有完整的一份，"
        "{ranks} 个 rank 一共占用 {total}：参数是 replicated，而不是 shard；若是切分，每份只有 {shard}。"
        "此外，每个 rank 还有自己的一份 gradient（{gradient}）和一份 {optimizer} state（{state}）。"
        "单个设备放不下的模型，用 DDP 同样放不下，那是 FSDP / ZeRO 要解决的问题。"
    ),
    "world.copied": (
        "我们故意让各个 rank 从不同的参数开始：校验和有 {before} 种。用 DDP 包装模型时，rank 0 的参数被复制到所有 rank，"
        "校验和只剩 {after} 种。此后所有 rank 都从同一个起点出发。"
    ),
    # ------------------------------------------------------------ 2 the samples
    "samples.title": "2. 数据如何分发：哪个 rank 拿到哪些样本",
    "samples.roles": (
        "DDP 本身不负责切分数据。`DistributedSampler` 决定哪些样本属于哪个 rank，DataLoader 再把它们组织成 batch。"
        "这里要把 {samples} 个样本分给 {ranks} 个 rank。"
    ),
    "samples.cut": "数据集共有 {samples} 个样本，下面只分发其中的前 {counted} 个。",
    "samples.map": "样本 0、1、2 …… {last} 分别属于哪个 rank",
    "samples.epoch": "epoch {epoch}",
    "samples.count": "样本数",
    "samples.first": "epoch 0 的前几个",
    "samples.forgotten": "epoch 1，没有 set_epoch",
    "samples.next": "epoch 1，set_epoch(1)",
    "samples.proof": (
        '怎么证明？走完一个 epoch，在所有 rank 上逐个计数。`pad="none"` 时，每个样本最少被分到 {least} 次，最多 {most} 次，'
        "总计 {dealt} 次。默认情况下，每个 rank 分到的样本一样多，都是 {share} 个，这样大家走的步数相同；"
        "为了补齐，顺序最靠前的 {twice} 个样本会被分到两次。"
    ),
    "samples.without": (
        "如果不用 sampler，每个 rank 都会读完全部 {samples} 个样本：一共读 {reads} 次，每个样本重复 {ranks} 遍，"
        "得到的 gradient 却和单进程一样。这只是重复计算，没有得到 data parallelism 的收益。"
    ),
    "samples.set_epoch": (
        "`set_epoch` 让每个 epoch 使用不同的 shuffle 顺序，同时保证所有 rank 用的是同一个顺序。如果不调用，到了下一个 epoch，"
        "rank 0 的 {places} 个位置中有 {same} 个还是原来的样本；调用之后，变成 {changed} 个。忘了调用时 Rankstep 会提醒：“{warning}”"
    ),
    # ------------------------------------------------------------ 3 gradients
    "gradients.title": "3. local gradient 与 global gradient",
    "gradients.local": (
        "每个 rank 取 {batch} 个样本作为 D_i，于是 global batch = {ranks} × {batch} = {total}。各 rank 独立计算自己的 loss L_i "
        "和 gradient g_i。数据不同，gradient 自然不同：两两之间的夹角在 {smallest} 到 {largest} 度之间。"
    ),
    "gradients.loss": "loss L_i",
    "gradients.length": "长度 |g_i|",
    "gradients.angle": "与均值的夹角",
    "gradients.element": "元素 {name}",
    "gradients.mean": "g_i 的均值",
    "gradients.one": "单进程",
    "gradients.wrapper": "backward() 之后",
    "gradients.picture": "各 rank 的 gradient 与它们的均值：长度、与均值的夹角都按实测值画出",
    "gradients.equal": (
        "真正想要的是整个 global batch 的 gradient。rank 0 用全部 {total} 个样本，像单进程那样独自把它算了出来。"
        "再做一次真实的 AllReduce，得到均值 g = (g_0 + … + g_{last}) / {ranks}：二者之差只有其长度的 {difference}；"
        "包装后的模型在每个 rank 的 `.grad` 里留下的结果，与它相差 {wrapper}。表格最后一列列出了其中一个元素，可以亲手验算。"
    ),
    "gradients.rounding": (
        "这点差别只是舍入误差：浮点数求和的顺序变了。N 个 rank 合在一起，就像一个进程。"
    ),
    "gradients.differs": (
        "对这个模型来说，这已经超出舍入误差：N 个 rank 合在一起，并不等于一个进程。原因见下文。"
    ),
    "gradients.angle_of": "{degrees} 度",
    "gradients.uneven": (
        "如果各 rank 的 local batch 大小不同（分别为 {sizes} 个样本），先各自取均值、再对均值取平均，小 batch 里的样本权重就会偏大："
        "误差 {plain}。`model.backward(loss_sum, count=n)` 让样本数搭最后一个 bucket 的 AllReduce 一起传送，再除以总数：误差 {exact}。"
    ),
    "gradients.uneven_plain": "均值的平均",
    "gradients.uneven_exact": "backward(loss_sum, count=n)",
    "gradients.off": "与单进程之差",
    # ------------------------------------------------------------ 4 drift
    "drift.title": "4. 为什么 gradient 必须同步",
    "drift.story": (
        "两组模型副本从相同的参数出发，用相同的数据各做 {steps} 步 SGD。第一组里，每个 rank 只用自己的 gradient 更新："
        "走完第一步，就已经有 {first} 个不同的模型；之后每一步都在不同的 θ 上计算 gradient，训练的其实已经不是同一个模型了。"
        "第二组则先同步 gradient，再更新。"
    ),
    "drift.apart": "各 rank 与 rank 0 的最大距离（占参数长度的比例）",
    "drift.alone": "不同步",
    "drift.with": "同步",
    "drift.step": "第 {step} 步",
    "drift.together": (
        "{steps} 步之后：不同步时相距 {apart}（参数长度的 {share}）；同步时相距 {together}，"
        "而且每一步之后，所有 rank 的校验和都相同，一个 bit 也不差。"
    ),
    "drift.parted": (
        "{steps} 步之后：不同步时相距 {apart}（参数长度的 {share}）；同步时本应一个 bit 也不差，实际却相距 {together}。"
    ),
    # ------------------------------------------------------------ 5 averaging
    "averaging.title": "5. 为什么同步 gradient，而不是直接同步参数",
    "averaging.story": (
        "看起来似乎也可以让每个 rank 先各自 step，再把参数平均。两种做法都实际跑了 {steps} 步，起点和数据完全相同。"
        "表中是两种结果之间的距离，以参数走过的路程为单位；最后一列是结束时各 rank 的 optimizer state 之间相差多少。"
    ),
    "averaging.optimizer": "optimizer",
    "averaging.each": "每步平均参数",
    "averaging.few": "每 {every} 步平均一次",
    "averaging.states": "state 之差",
    "averaging.no_state": "没有 state",
    "averaging.linear": (
        "SGD 的一步对 gradient 是线性的，带 momentum 也是如此，所以只要每一步都平均，除了舍入误差，参数就是相同的。"
        "但请看 state：每个 rank 的 momentum 只来自自己的 gradient，任何一个 rank 的 checkpoint 都不再代表全体；"
        "而且只要不是每一步都平均，连 SGD 的结果也会不同。"
    ),
    "averaging.adaptive": (
        "Adam 和 AdamW 的每一步都要除以 gradient 平方的滑动平均的平方根，所以各走一步再平均，不等于先平均再走一步："
        "{steps} 步之后，两种做法的结果分别相差这段路程的 {adam} 和 {adamw}。同步 gradient 就没有这些顾虑："
        "相同的 gradient，加上相同的 state，无论哪种 optimizer，更新都相同。"
    ),
    # ------------------------------------------------------------ 6 backward
    "backward.title": "6. 一次真实的 backward",
    "backward.story": (
        "backward 并不是一次性算出所有 gradient：它沿着 autograd graph，从 loss 反向走到输入，各个参数的 gradient 陆续 ready。"
        "每个参数上都挂着一个 hook，gradient 一旦 ready 就通知它所在的 bucket；bucket 装满，立刻发出，backward 同时继续。"
        "每个 rank 上都记录了 {recorded} 步，下面是其中最快的一步。"
    ),
    "backward.lane_forward": "forward",
    "backward.lane_backward": "backward",
    "backward.lane_ready": "ready",
    "backward.lane_bucket": "bucket {bucket}",
    "backward.lane_step": "step",
    "backward.legend": (
        "{forward} forward   {compute} backward（到最后一个 gradient 为止）   {wait} 等待 bucket   {tick} 一个 gradient ready   "
        "{flight} bucket 正在通信   {step} optimizer.step()"
    ),
    "backward.of_rank": "rank {rank}",
    "backward.order": "rank 0 上各个 gradient ready 的先后顺序；时间单位为毫秒",
    "backward.parameter": "参数",
    "backward.bucket": "bucket",
    "backward.ready_at": "ready",
    "backward.left_at": "bucket 发出",
    "backward.back_at": "bucket 返回",
    "backward.more": "…… 另有 {count} 个",
    "backward.overlap": (
        "{tensors} 个 gradient 装在 {buckets} 个 bucket 里（装到 {cap} 即满），一共用了 {all_reduces} 次 AllReduce；其中 {early} 次"
        "发出时 backward 还在进行，最后一次则在 backward 结束时发出。在 rank 0 上，通信共持续 {flight}，其中 {hidden}（{share}）"
        "与计算重叠：那段时间里，它还在计算 gradient。"
    ),
    "backward.hidden": (
        "所谓重叠（overlap），是指发生在最后一个 gradient ready 之前的通信。这里 {ranks} 个进程共用 {cores} 个核，"
        "算完全部 gradient 用了 {compute}：计算的时间越长，能被掩盖的通信就越多。"
    ),
    # ------------------------------------------------------------ 7 what if
    "whatif.title": "7. 如果换一种做法",
    "whatif.job": (
        "对这个模型（{tensors} 个 tensor，{bytes}）做一次 backward，用四种方式同步 gradient，轮流各跑 {repeats} 次："
        "取中位数，每次以最慢的 rank 为准。rank 之间的传输方式都相同：{way}。"
    ),
    "whatif.many": (
        "再看一个由 {tensors} 个小 tensor 组成的模型，每个 tensor 只有 {elements} 个数（共 {bytes}）：一次 AllReduce 几乎没有东西可传，"
        "测到的就是启动一次的开销。使用 bucket 的几种方式取 {repeats} 次的中位数；每个 tensor 单独 AllReduce 的方式只跑一次。"
    ),
    "whatif.whole": (
        "{run} 次 AllReduce 一次不落、逐个跑完：平均每次 {each}，总时间是按计划分 bucket（{all_reduces} 次 AllReduce）的 {slower} 倍。"
        "每一次都要付出启动的开销。"
    ),
    "whatif.cut": (
        "时间不够把 {tensors} 次全部跑完：逐个跑了 {run} 次 AllReduce，表中就是这些次的时间。平均每次 {each}，"
        "已经是按计划分 bucket 同步全部 {tensors} 个 tensor（{all_reduces} 次 AllReduce）的 {slower} 倍。"
        "每一次都要付出启动的开销。想多跑一些，可以用 `--seconds` 放宽时间。"
    ),
    "whatif.shared": "共享内存",
    "whatif.way": "方式",
    "whatif.count": "AllReduce 次数",
    "whatif.time": "毫秒",
    "whatif.spread": "最短到最长",
    "whatif.per_parameter": "每个参数单独 AllReduce",
    "whatif.after_backward": "分 bucket，但等 backward 结束才发出",
    "whatif.one_bucket": "一个大 bucket",
    "whatif.plan": "按计划分 bucket",
    "whatif.reading": (
        "一个大 bucket 的启动次数最少，但必须等到最后一个 gradient ready 才能发出，什么也掩盖不了。分 bucket 是折中："
        "启动次数少，而且大多发得早。在与别人共用的机器上、在很小的模型上，后三种的快慢可能互换；次数不会变。"
    ),
    # ------------------------------------------------------------ 8 steps
    "steps.title": "8. 每个 rank 各自执行 optimizer.step()",
    "steps.story": (
        "在包装后的模型上用 {optimizer} 走了 {steps} 步。没有任何 rank 把参数发给别的 rank：每个 rank 用相同的 gradient 和相同的 state，"
        "独立更新自己的那一份。每一步之后，都比较全部参数的 SHA-256。"
    ),
    "steps.step": "第几步",
    "steps.loss": "平均 loss",
    "steps.checksums": "不同的校验和",
    "steps.one_loss": "单进程",
    "steps.weights": "rank 0、1、2 …… 上参数的校验和",
    "steps.last": "最后一步之后",
    "steps.one": (
        "一个进程独自用同样的 global batch 训练，最后与这 {ranks} 个 rank 的结果相差这段路程的 {apart}。"
    ),
    "steps.rounding": "除了舍入误差（optimizer 可能会把它放大），这就是同一次训练。",
    "steps.differs": "这并不奇怪：在第 3 部分里，它的 gradient 就已经不同了。",
    # ------------------------------------------------------------ the claims
    "claims.all": "共 {count} 条结论，全部成立。用时 {seconds} 秒。",
    "claims.some": "{count} 条结论中有 {failed} 条不成立：{names}。用时 {seconds} 秒。",
    "claim.world.rank": "rank = 节点 × 每个节点的 rank 数 + local_rank，一个节点和两个节点都如此",
    "claim.world.whole": "每个 rank 都有一份完整模型",
    "claim.world.copied": "包装之后，所有 rank 都从 rank 0 的参数出发",
    "claim.samples.once": "每个样本恰好被分到一次",
    "claim.samples.padded": "默认情况下各 rank 的样本一样多，且没有遗漏",
    "claim.samples.set_epoch": "调用 set_epoch 顺序会变，不调用则顺序重复",
    "claim.gradients.mean": "local gradient 的均值就是单进程的 gradient",
    "claim.gradients.wrapper": "backward() 之后，每个 rank 都得到这个 gradient",
    "claim.gradients.uneven": "带上样本数，batch 大小不一时也精确",
    "claim.drift.alone": "不同步，各 rank 的参数就会分开",
    "claim.drift.together": "同步之后，参数始终相同，一个 bit 也不差",
    "claim.averaging.sgd": "对 SGD，每步平均参数，结果相同",
    "claim.averaging.momentum": "对带 momentum 的 SGD，参数也相同",
    "claim.averaging.adam": "对 Adam，结果不同",
    "claim.averaging.adamw": "对 AdamW，结果也不同",
    "claim.backward.once": "每个 gradient 只 ready 一次",
    "claim.backward.filled": "bucket 里最后一个 gradient ready 之前，bucket 不会发出",
    "claim.backward.order": "所有 rank 都按同样的顺序发出 bucket",
    "claim.backward.count": "每个 bucket 一次 AllReduce，没有多余的",
    "claim.whatif.count": "分 bucket 需要的 AllReduce 次数远少于参数 tensor 的个数",
    "claim.whatif.same": "几种方式得到的 gradient 相同",
    "claim.steps.weights": "每一步之后，所有 rank 的参数都相同",
    "claim.steps.state": "optimizer state 也相同",
    # ------------------------------------------------------------ why a claim did not hold
    "cause.batch_statistics": (
        "模型用自己那个 batch 的统计量做归一化，而一个 rank 上的 batch 比单进程的小：{modules}。"
        "改用 torch.nn.SyncBatchNorm，或不依赖 batch 统计量的归一化即可"
    ),
    "cause.draws": (
        "模型里有随机数，{ranks} 个 rank 抽到的与单进程不同：{modules}。在 eval() 模式下 gradient 是相同的"
    ),
    "cause.training_mode": (
        "模型在 train() 模式下的计算与 eval() 模式不同，而在 eval() 模式下 gradient 相同：其中有随机数，或者依赖整个 batch"
    ),
    "cause.loss_no_mean": (
        "loss 不是对样本取平均：单进程得到 {one_process}，各 rank 的平均是 {mean_of_ranks}。"
        "如果是求和，或者是对 token、像素取平均，请用 model.backward(loss_sum, count=n)；"
        "如果同一个 batch 里的样本互相影响（例如对比学习的 loss），需要先把它们收集到一起"
    ),
    "cause.arithmetic": (
        "与 loss 和模式无关：模型的计算精度低于参数的精度（autocast），或者同一个 batch 里的样本互相影响"
    ),
    "cause.not_finite": "出现了 NaN 或无穷大的 loss、gradient 或参数",
    "cause.no_second_world": "第二个集群没能启动：{said}",
    "cause.equal_gradients": (
        "所有 rank 的 gradient 都相同（例如样本全都一样）：这样就没有什么会让它们分开，平均与否也没有区别"
    ),
    "cause.coarse_weights": "参数的有效位数太少：单凭舍入误差就可能造成这么大的差别",
    "cause.unknown": "explain 不知道原因；可以用 `rankstep check` 进一步检查",
}
