"""The story in Chinese, in the words of the field."""

# ruff: noqa: RUF001 - full-width punctuation is what Chinese is written with

from __future__ import annotations

from typing import Final

TEXTS: Final = {
    # ------------------------------------------------------------ while the ranks are running
    "progress.start": "正在启动 {ranks} 个 rank",
    "progress.job": "加载任务，先试跑一步",
    "progress.world": "训练世界",
    "progress.samples": "数据如何分发",
    "progress.gradients": "local gradient 与 global gradient",
    "progress.drift": "不同步与同步",
    "progress.averaging": "平均 gradient 与平均 parameter",
    "progress.backward": "记录一次 backward",
    "progress.whatif": "换几种方式做 AllReduce，另加 {tensors} 个小 tensor",
    "progress.steps": "各 rank 执行 optimizer.step()",
    # ------------------------------------------------------------ the frame
    "title": "用一次真实运行讲清楚 DDP",
    "built_in": "内置的手写数字模型",
    "intro": (
        "这台机器上的 {ranks} 个进程刚刚把{job}训练了几步。下面的每一个数字都是这次运行实测出来的，没有一个是背出来的。"
        "DDP 解决的核心问题很直接：让多个设备在不同的数据上各自计算 gradient，再把这些 gradient 同步起来，"
        "使它们合起来就像一个进程在更大的 batch 上训练。"
    ),
    "chain": "一条完整的链，配上这次运行的数字",
    "chain.dataset": "Dataset：{samples} 个样本",
    "chain.sampler": "DistributedSampler：{ranks} 个 rank，每个分到 {share} 个",
    "chain.batch": "local batch：每个 rank {batch} 个样本，global batch 共 {total} 个",
    "chain.loss": "Forward，各自的 loss：{losses}",
    "chain.ready": "Backward，gradient 陆续 ready：{tensors} 个 tensor",
    "chain.bucket": "Hook 填充 bucket：{buckets} 个 bucket",
    "chain.reduce": "AllReduce：{all_reduces} 次，其中 {early} 次在 backward 结束之前就已发出",
    "chain.step": "每个 rank 各自执行 optimizer.step()：{optimizer}",
    "chain.equal": "所有 rank 的参数：校验和只有 {checksums} 种",
    "rank": "rank",
    "ranks": "各 rank",
    "claim": "结论",
    "measured": "实测",
    "held": "成立",
    "failed": "不成立",
    "verdict": "{word}：{claim}",
    "separator": "；",
    "because": "原因：{cause}",
    "none": "无",
    # ------------------------------------------------------------ 1 the world
    "world.title": "1. 训练世界：一个 rank 就是一个进程，各有一份完整模型",
    "world.ranks": (
        "`world_size` = {ranks}，即参与训练的进程总数。`rank` 是全局唯一的进程编号，`local_rank` 是本机内部的编号。"
        "这次只有 {nodes} 台机器，所以两者相同；如果再加一台同样规模的机器，它的 local_rank 0 就是 rank {next}，"
        "这时单凭 local_rank 就认不出是谁了。"
    ),
    "world.node": "机器",
    "world.device": "设备",
    "world.pid": "进程号",
    "world.model": "模型",
    "world.before": "包装前的参数",
    "world.after": "包装后",
    "world.whole": (
        "{model} 共有 {parameters} 个参数，分布在 {tensors} 个 tensor 里，合计 {bytes}。每个 rank 都持有完整的一份，"
        "{ranks} 个 rank 一共 {total}：这是 replicated，不是 shard；若是切分，每份只有 {shard}。"
        "此外每个 rank 还有自己的一份 gradient（{gradient}）和一份 {optimizer} 状态（{state}）。"
        "单个设备放不下的模型，DDP 也放不下，那是 FSDP / ZeRO 要解决的问题。"
    ),
    "world.copied": (
        "我们故意让各 rank 的初始参数互不相同：共有 {before} 种校验和。包装模型时，rank 0 的参数被复制到所有 rank，"
        "之后只剩 {after} 种。从此大家站在同一个起点上。"
    ),
    # ------------------------------------------------------------ 2 the samples
    "samples.title": "2. 数据如何分发：哪个 rank 拿哪些样本",
    "samples.roles": (
        "DDP 本身不负责切分数据。`DistributedSampler` 决定哪些样本属于哪个 rank，DataLoader 再把它们组织成 batch。"
        "这里要把 {samples} 个样本分给 {ranks} 个 rank。"
    ),
    "samples.cut": "数据集共有 {samples} 个样本；下面只分发其中前 {counted} 个。",
    "samples.map": "样本 0、1、2 …… {last} 分别归哪个 rank",
    "samples.epoch": "epoch {epoch}",
    "samples.count": "样本数",
    "samples.first": "epoch 0 的开头",
    "samples.forgotten": "epoch 1，未调用 set_epoch",
    "samples.next": "epoch 1，已调用 set_epoch(1)",
    "samples.proof": (
        '证明：把整个 epoch 走完，在所有 rank 上逐个计数。`pad="none"` 时，每个样本最少被分到 {least} 次、最多 {most} 次，'
        "总计 {dealt} 次。默认情况下各 rank 数量相同，都是 {share} 个，这样大家走的步数一样；为了补齐，"
        "顺序最前面的 {twice} 个样本会被分到两次。"
    ),
    "samples.without": (
        "如果不用 sampler，每个 rank 都会读完全部 {samples} 个样本：共读 {reads} 次，每个样本重复 {ranks} 遍，"
        "得到的 gradient 却和单进程一样。这只是重复计算，不是 data parallelism。"
    ),
    "samples.set_epoch": (
        "`set_epoch` 让每个 epoch 使用不同的 shuffle 顺序，同时保证所有 rank 用的是同一个顺序。不调用它，下一个 epoch 里 "
        "rank 0 的 {places} 个位置中有 {same} 个还是原来的样本；调用之后只有 {changed} 个。Rankstep 会提醒：「{warning}」"
    ),
    # ------------------------------------------------------------ 3 gradients
    "gradients.title": "3. local gradient 与 global gradient",
    "gradients.local": (
        "每个 rank 各取 {batch} 个样本 D_i，于是 global batch = {ranks} × {batch} = {total}。各 rank 独立算出自己的 loss L_i "
        "和 gradient g_i。数据不同，gradient 自然不同：两两之间的夹角在 {smallest} 到 {largest} 度之间。"
    ),
    "gradients.loss": "loss L_i",
    "gradients.length": "长度 |g_i|",
    "gradients.angle": "与均值的夹角",
    "gradients.element": "元素 {name}",
    "gradients.mean": "g_i 的均值",
    "gradients.one": "单进程",
    "gradients.wrapper": "backward() 之后",
    "gradients.equal": (
        "真正想要的是整个 global batch 的 gradient。rank 0 像单进程那样独自用全部 {total} 个样本把它算了出来。"
        "经过一次真实的 AllReduce 得到的均值 g = (g_0 + … + g_{last}) / {ranks} 与它相差 {difference}（相对长度）；"
        "包装后的模型在每个 rank 的 `.grad` 里留下的结果与它相差 {wrapper}。表格最后一列可以用手验算一个数。"
    ),
    "gradients.rounding": (
        "这点差别只是舍入误差：浮点数换了一个求和顺序。N 个 rank 合起来就像一个进程。"
    ),
    "gradients.differs": (
        "对这个模型来说，这已经超出舍入误差：N 个 rank 合起来并不等于一个进程。原因见下面。"
    ),
    "gradients.angle_of": "{degrees} 度",
    "gradients.uneven": (
        "如果各 rank 的 local batch 大小不同（分别是 {sizes} 个样本），直接平均各 rank 的均值，会让小 batch 里的样本权重偏大："
        "误差 {plain}。`model.backward(loss_sum, count=n)` 让样本数随最后一个 bucket 一起传送，再除以总数：误差 {exact}。"
    ),
    "gradients.uneven_plain": "各均值再平均",
    "gradients.uneven_exact": "backward(loss_sum, count=n)",
    "gradients.off": "与单进程之差",
    # ------------------------------------------------------------ 4 drift
    "drift.title": "4. 为什么 gradient 必须同步",
    "drift.story": (
        "两组模型副本从相同的参数出发，用相同的数据各做 {steps} 步 SGD。第一组里每个 rank 只用自己的 gradient："
        "走完第一步就已经有 {first} 个互不相同的模型，之后每一步都是在不同的 θ 上算 gradient，训练的已经不是同一个模型了。"
        "第二组则先同步 gradient 再更新。"
    ),
    "drift.alone": "不同步时，离 rank 0 最远的 rank 与它的距离（占参数长度的比例）",
    "drift.step": "第 {step} 步",
    "drift.together": (
        "{steps} 步之后：不同步时相距 {apart}（参数长度的 {share}）；同步时相距 {together}，"
        "而且每一步之后所有 rank 的校验和都相同，一个 bit 也不差。"
    ),
    # ------------------------------------------------------------ 5 averaging
    "averaging.title": "5. 为什么同步 gradient，而不是直接同步 parameter",
    "averaging.story": (
        "也可以让每个 rank 先各自 step，再把参数平均。两种做法都从相同的参数出发、用相同的数据真实跑了 {steps} 步。"
        "表中是两种结果之间的距离，以参数走过的路程为单位；最后一列是结束时各 rank 的 optimizer state 相差多少。"
    ),
    "averaging.optimizer": "optimizer",
    "averaging.each": "每步平均参数",
    "averaging.few": "每 {every} 步平均一次",
    "averaging.states": "state 之差",
    "averaging.no_state": "没有 state",
    "averaging.linear": (
        "SGD 的一步对 gradient 是线性的，带 momentum 也一样，所以只要每一步都平均，参数除了舍入误差就是相同的。"
        "但是请看 state：每个 rank 保存的是自己那份 gradient 的 momentum，任何一个 rank 的 checkpoint 都不再代表全体；"
        "而且只要不是每一步都平均，连 SGD 也会不同。"
    ),
    "averaging.adaptive": (
        "Adam 和 AdamW 要除以 gradient 平方的滑动平均的平方根：各自走一步再平均，不等于用平均后的 gradient 走一步。"
        "{steps} 步之后两种结果分别相差路程的 {adam} 和 {adamw}。同步 gradient 就没有这些顾虑："
        "相同的 gradient 加上相同的 state，无论哪种 optimizer，更新都相同。"
    ),
    # ------------------------------------------------------------ 6 backward
    "backward.title": "6. 一次真实的 backward",
    "backward.story": (
        "backward 并不是一次性算出所有 gradient：它沿着 autograd graph 从 loss 反向走到输入，各个参数的 gradient 陆续 ready。"
        "挂在每个参数上的 hook 通知它所在的 bucket；bucket 一满就立刻发出，backward 同时继续。"
        "在每个 rank 上记录了 {recorded} 步，下面是其中最快的一步，单位是从这一步开始算起的毫秒数。"
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
    "backward.order": "rank 0 上的先后顺序",
    "backward.parameter": "参数",
    "backward.bucket": "bucket",
    "backward.ready_at": "ready",
    "backward.left_at": "bucket 发出",
    "backward.back_at": "bucket 返回",
    "backward.more": "…… 另有 {count} 个",
    "backward.overlap": (
        "{buckets} 个 bucket（上限 {cap}）用 {all_reduces} 次 AllReduce 运送了 {tensors} 个 gradient；其中 {early} 次在 backward "
        "结束之前就已发出，最后一个随 backward 结束一起发出。rank 0 上通信共持续 {flight}，其中 {hidden}（{share}）被计算掩盖："
        "那段时间里它还在算 gradient。"
    ),
    "backward.hidden": (
        "所谓掩盖（overlap），是指发生在最后一个 gradient ready 之前的通信。这里 {ranks} 个进程共用 {cores} 个核，"
        "算完全部 gradient 用了 {compute}：计算的时间越长，能掩盖的通信就越多。"
    ),
    # ------------------------------------------------------------ 7 what if
    "whatif.title": "7. 如果换一种做法",
    "whatif.job": (
        "对这个模型（{tensors} 个 tensor，{bytes}）做一次 backward，用四种方式同步 gradient，轮流各跑 {repeats} 次："
        "取中位数，每次都以最慢的 rank 为准。"
    ),
    "whatif.many": (
        "再看一个由 {tensors} 个小 tensor 组成的模型，每个只有 {elements} 个数（共 {bytes}）。用 bucket 的几种方式取 {repeats} 次的中位数；"
        "每个 tensor 单独 AllReduce 的方式只跑一次。"
    ),
    "whatif.cut": (
        "{tensors} 次 AllReduce 跑到第 {run} 次时已经太久，于是中止；表中的时间由已经跑完的部分推算得出。"
    ),
    "whatif.way": "方式",
    "whatif.count": "AllReduce 次数",
    "whatif.time": "毫秒",
    "whatif.spread": "最少到最多",
    "whatif.per_parameter": "每个参数单独 AllReduce",
    "whatif.after_backward": "用 bucket，但等 backward 结束后才发",
    "whatif.one_bucket": "一个大 bucket",
    "whatif.plan": "按计划分 bucket",
    "whatif.reading": (
        "几种方式得到的 gradient 相同。{tensors} 次 AllReduce 花的时间是按计划 {all_reduces} 次的 {slower} 倍：每一次都要付出启动的代价。"
        "一个大 bucket 启动次数最少，但必须等到最后一个 gradient 才能发出，什么也掩盖不了。分 bucket 是折中：启动次数少，"
        "而且大多发得早。在共享的机器和很小的模型上，后三种的快慢可能互换；次数不会变。"
    ),
    # ------------------------------------------------------------ 8 steps
    "steps.title": "8. 每个 rank 各自执行 optimizer.step()",
    "steps.story": (
        "在包装后的模型上用 {optimizer} 走 {steps} 步。没有任何 rank 把参数发给别人：每个 rank 用相同的 gradient 和相同的 state "
        "独立更新。每一步之后都比较全部参数的 SHA-256。"
    ),
    "steps.step": "步",
    "steps.loss": "平均 loss",
    "steps.checksums": "不同的校验和",
    "steps.one_loss": "单进程",
    "steps.weights": "参数的校验和：{digest}（{ranks}）",
    "steps.one": (
        "一个进程独自用同样的 global batch 训练，最后与这 {ranks} 个 rank 相差路程的 {apart}。"
    ),
    "steps.rounding": "除了舍入误差（optimizer 可能把它放大），这就是同一次训练。",
    "steps.differs": "这并不奇怪：在第 3 部分，它的 gradient 就已经不同了。",
    # ------------------------------------------------------------ the claims
    "claims.title": "说了什么，是否成立",
    "claims.all": "共 {count} 条结论，全部成立。用时 {seconds} 秒。",
    "claims.some": "{count} 条结论中有 {failed} 条不成立：{names}。用时 {seconds} 秒。",
    "claim.world.whole": "每个 rank 都有一份完整模型",
    "claim.world.copied": "包装之后，所有 rank 都从 rank 0 的参数出发",
    "claim.samples.once": "每个样本恰好被分到一次",
    "claim.samples.padded": "默认情况下各 rank 的样本一样多，且没有遗漏",
    "claim.samples.set_epoch": "set_epoch 改变顺序；不调用则顺序重复",
    "claim.gradients.mean": "local gradient 的均值就是单进程的 gradient",
    "claim.gradients.wrapper": "backward() 之后每个 rank 都得到这个 gradient",
    "claim.gradients.uneven": "带上样本数，batch 大小不一也精确",
    "claim.drift.alone": "不同步，各 rank 的参数就会分开",
    "claim.drift.together": "同步之后参数始终相同，一个 bit 也不差",
    "claim.averaging.sgd": "对 SGD，每步平均参数的结果相同",
    "claim.averaging.momentum": "对带 momentum 的 SGD，参数也相同",
    "claim.averaging.adam": "对 Adam 则不同",
    "claim.averaging.adamw": "对 AdamW 也不同",
    "claim.backward.once": "每个 gradient 只 ready 一次",
    "claim.backward.filled": "bucket 里最后一个 gradient ready 之前，bucket 不会发出",
    "claim.backward.order": "所有 rank 按同样的顺序发出 bucket",
    "claim.backward.count": "每个 bucket 一次 AllReduce，没有多余的",
    "claim.whatif.count": "bucket 需要的 AllReduce 次数远少于参数个数",
    "claim.whatif.same": "几种方式得到的 gradient 相同",
    "claim.steps.weights": "每一步之后所有 rank 的参数相同",
    "claim.steps.state": "optimizer state 也相同",
    # ------------------------------------------------------------ why a claim did not hold
    "cause.batch_statistics": (
        "模型用自己 batch 的统计量做归一化，而一个 rank 上的 batch 比单进程的小：{modules}。"
        "改用 torch.nn.SyncBatchNorm 或不依赖 batch 统计量的归一化即可"
    ),
    "cause.draws": (
        "模型里有随机数，{ranks} 个 rank 抽到的与单进程不同：{modules}。在 eval() 模式下 gradient 是相同的"
    ),
    "cause.training_mode": (
        "模型在 train() 模式下的计算与 eval() 模式不同，而 eval() 模式下 gradient 相同：其中有随机数，或者依赖整个 batch"
    ),
    "cause.loss_no_mean": (
        "loss 不是对样本取平均：单进程得到 {one_process}，各 rank 的平均是 {mean_of_ranks}。"
        "若是求和，或是对 token、像素取平均，请用 model.backward(loss_sum, count=n)"
    ),
    "cause.arithmetic": (
        "与 loss 和模式无关：模型的计算精度低于参数精度（autocast），或者同一个 batch 里的样本互相影响"
    ),
    "cause.not_finite": "出现了 NaN 或无穷大的 loss、gradient 或参数",
    "cause.unknown": "explain 不知道原因；可以用 `rankstep check` 进一步检查",
}
