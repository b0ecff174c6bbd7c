"""FSDP2's own order of allocations over one optimizer step, replayed on a plan without a model.

[Note: what FSDP2 holds when]
Read from ``torch/distributed/fsdp/_fully_shard`` of torch 2.13. Gathering a unit allocates the flat output of the
all-gather (and the cast shards, its input), then the unit's parameters, into which it is copied. In forward the flat
output is freed only after the next unit's copy, so that the two overlap; in backward at once, and the next unit's
all-gather has started by then. What is resharded to part of the ranks is a copy, which stays until it is gathered
again. Reducing a unit allocates a flat input, which frees the gradients that are copied into it and stays until the
next unit reduces, and the output, which is the sharded gradient.
"""

from collections import Counter
from dataclasses import dataclass, field

from mmzero.engines.fsdp2.stages import StageRules
from mmzero.engines.fsdp2.unit_bytes import UnitLayout, UnitNode
from mmzero.policies import Unit


@dataclass
class Replay:
    """Replays the micro-batches of one optimizer step.

    Args:
        layouts (list[tuple[Unit, UnitLayout]]): The units of a plan, and how each is gathered and reduced.
        rules (StageRules): Of the stage.
        lasting (dict[str, int]): What is there from the start: shards of parameters, optimizer state.
    """

    layouts: list[tuple[Unit, UnitLayout]]
    rules: StageRules
    lasting: dict[str, int]
    now: Counter = field(default_factory=Counter)
    peak: dict[str, int] = field(default_factory=dict)
    most_alive: int = 0

    def run(self, micro_batches: int) -> None:
        """Run forward and backward of all micro-batches; fills ``peak`` and ``most_alive``.

        Args:
            micro_batches (int): Per optimizer step.
        """
        self.now.update(self.lasting)
        root = self._tree()
        for index in range(micro_batches):
            is_last = index == micro_batches - 1
            self.order: list[UnitNode] = []
            self.held = 0
            self._forward(root)
            self._take('in flight', -self.held)
            self.reducing = self.outputs = 0
            self._backward(root, is_last)
            self._take('in flight', -self.reducing - self.outputs)

    def alive_bytes(self) -> int:
        """The most bytes of gathered parameters and buffers that were there at once."""
        return self.most_alive

    def _tree(self) -> UnitNode:
        nodes = {unit.name: UnitNode(unit, layout) for unit, layout in self.layouts}
        for name, node in nodes.items():
            if name:
                nodes[self._parent(name, nodes)].children.append(node)
        return nodes['']

    def _parent(self, name: str, nodes: dict[str, UnitNode]) -> str:
        while name:
            name = name.rpartition('.')[0]
            if name in nodes:
                return name
        return ''

    def _take(self, category: str, size: int) -> None:
        self.now[category] += size
        self.most_alive = max(self.most_alive, self.now['gathered'] + self.now['in flight'])
        if sum(self.now.values()) > sum(self.peak.values()):
            self.peak = dict(self.now)

    def _fetch(self, node: UnitNode) -> None:
        if node.is_gathered or node.is_fetched:
            return
        node.is_fetched = True
        cast = node.resharded if node.is_cast else node.bytes.cast
        copied = self._copied(node)
        # A copy of what is cast goes as soon as its cast is there.
        self._take('in flight', cast + copied)
        self._take('in flight', -copied if node.is_cast else 0)
        self._take('in flight', node.flat)
        self._take('in flight', -cast - (0 if node.is_cast else copied))

    def _copied(self, node: UnitNode) -> int:
        """Bytes of shards that are copied from host memory for an all-gather, and are there at once."""
        if not node.layout.is_on_host or node.layout.shard_size == 1 or node.resharded:
            return 0
        return node.bytes.largest if node.is_cast else node.bytes.kept

    def _copy_out(self, node: UnitNode) -> None:
        # Without other ranks shards are copied one by one.
        alone = node.bytes.largest if node.layout.is_on_host and node.layout.shard_size == 1 else 0
        self._take('gathered', node.bytes.gathered + node.rearranged)
        self._take('in flight', alone)
        self._take('in flight', -alone)
        self._take('gathered', -node.rearranged)

    def _free(self, node: UnitNode) -> None:
        if node.is_gathered:
            node.is_gathered = False
            self._take('gathered', -node.bytes.gathered)

    def _forward(self, node: UnitNode) -> None:
        if not node.is_gathered:
            self._fetch(node)
            self._copy_out(node)
            self._take('in flight', -self.held)
            self.held = node.flat
            node.is_gathered, node.is_fetched = True, False
        for _, member in node.members():
            if isinstance(member, UnitNode):
                self._forward(member)
        self._reshard(node)
        self.order.append(node)

    def _reshard(self, node: UnitNode) -> None:
        ranks = node.layout.backward_size
        if node.layout.reshard_after_forward is False:
            return
        if ranks != node.layout.shard_size:
            node.resharded = node.bytes.gathered // ranks
            self._take('gathered', node.resharded)
        self._free(node)

    def _backward(self, node: UnitNode, is_last: bool) -> None:
        if not node.is_gathered:
            self._fetch(node)
            self._copy_out(node)
            self._take('gathered', -node.resharded)
            self._take('in flight', -node.flat)
            node.resharded = 0
            node.is_gathered, node.is_fetched = True, False
        place = self.order.index(node)
        if place:
            self._fetch(self.order[place - 1])
        fresh = 0
        for _, member in reversed(node.members()):
            if isinstance(member, UnitNode):
                self._backward(member, is_last)
                continue
            size = node.gradient_bytes(member)
            if node.whole_gradients and node.itemsizes[member] == node.reduce_itemsize:
                # Autograd adds to what is there.
                continue
            fresh += size
            self._take('gradients', size)
        self._after_backward(node, fresh, is_last)

    def _after_backward(self, node: UnitNode, fresh: int, is_last: bool) -> None:
        accumulates = node.whole_gradients > 0
        if accumulates:
            self._take('gradients', -fresh)
        reshards = is_last or not self.rules.keep_gathered
        if reshards:
            self._free(node)
        if not (is_last or self.rules.sync_every_micro_step):
            if not accumulates:
                self._keep_whole(node, fresh)
            return
        self._take('in flight', -self.reducing)
        self.reducing = node.bytes.reduced
        self._take('in flight', node.largest_across)
        self._take('in flight', self.reducing + node.last_across - node.largest_across)
        self._take('gradients', -(node.whole_gradients if accumulates else fresh))
        node.whole_gradients = 0
        self._reduce(node)
        self._take('in flight', -node.last_across)

    def _reduce(self, node: UnitNode) -> None:
        output, sharded = node.bytes.output, node.bytes.sharded
        stays = not node.layout.is_on_host
        becomes_gradient = stays and output == sharded and not node.has_sharded_gradients
        self._take('in flight', output)
        if output != sharded:
            self._take('in flight', sharded)
        if node.layout.is_on_host:
            # Copied to host memory.
            self._take('in flight', -sharded if output != sharded else 0)
        elif not node.has_sharded_gradients:
            node.has_sharded_gradients = True
            self._take('in flight', -sharded)
            self._take('gradients', sharded)
        elif output != sharded:
            self._take('in flight', -sharded)
        if not becomes_gradient:
            # The input of the all-reduce between replicas is held until the end of backward.
            self.outputs += output if node.layout.is_replicated else 0
            self._take('in flight', 0 if node.layout.is_replicated else -output)

    def _keep_whole(self, node: UnitNode, fresh: int) -> None:
        """Without a reduction gradients stay whole, in the dtype of the reduction."""
        own = [member for _, member in node.members() if isinstance(member, int)]
        kept = sum(node.gradient_bytes(index) // node.itemsizes[index] * node.reduce_itemsize for index in own)
        node.whole_gradients = kept
        if kept != fresh:
            # Parameter by parameter, so that hardly more than the larger of the two is alive.
            self._take('gradients', kept - fresh)
