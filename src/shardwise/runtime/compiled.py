"""Compile the kernels of a program's regions (``programs.compile_regions``) with PyTorch's compiler.

Compiling is a pass over the program. A region's forward and backward are traced as one graph. PyTorch's partitioner
decides which values to save; cheap ones are recomputed in backward. Each half is cut into sections where messages leave
or arrive, and Inductor compiles each section. The result is an ordinary program whose instructions are sections and
exchanges; it is emitted, checked and differentiated like any other. Regions of one kind share their sections, so a
repeated layer is compiled once.

Only this module calls ``min_cut_rematerialization_partition``, Inductor's joint passes and ``compile_fx_inner``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.costs.kernels import KernelWork
from shardwise.errors import warn_user
from shardwise.graph.custom_operators import decomposed_dropout, dropout
from shardwise.graph.ir import Ref
from shardwise.graph.trees import storage_of
from shardwise.programs.compile_regions import CompileRegion, SectionIndex, divide, kind_of, renamed
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Compute, Convert, Depart, Instruction, Origin, Part
from shardwise.programs.rank_program import RankProgram
from shardwise.runtime.agree import show_progress_once
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.emit import Boxed, ModuleWriter

aten = torch.ops.aten
_Variant = TypeVar("_Variant")

# (a graph of kernels, its fake operands, the outputs whose strides are fixed) ->
# (a function that takes the operands as a list and empties it; the strides of its results, None for the graph's).
Generate = Callable[
    [fx.GraphModule, Sequence[Tensor], Sequence[int]],
    tuple[Callable[[list[Tensor]], Sequence[Tensor]], Sequence[tuple[int, ...] | None]],
]


@dataclass
class CompiledVariant(Generic[_Variant]):
    """The compiled variant of a step, made by ``make`` on first use. ``falls_back``: whether this rank runs eager, with
    a warning, if it does not compile. Ranks send the same messages in the same order either way, so each may fall back
    on its own. ``ranks``: for the warning."""

    make: Callable[[], _Variant]
    falls_back: bool
    ranks: Communicator
    variant: _Variant | None = None
    _failed: bool = False

    def get(self) -> _Variant | None:
        """Return the variant, or None if it does not compile and the step runs eager."""
        if self.variant is None and not self._failed:
            try:
                self.variant = self.make()
            except Exception as error:
                if not self.falls_back:
                    raise
                self._failed = True
                warn_user(
                    f"the step of {self.ranks.name} runs eager on rank {self.ranks.rank}, since it does not compile: "
                    f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}; compile=True shows the whole "
                    "error, compile=False disables compilation",
                    UserWarning,
                )
        return self.variant


@dataclass(frozen=True)
class CompiledKernels(Boxed):
    """A section as one function. ``strides``: the ones its operands must have."""

    function: Callable[[list[Tensor]], Sequence[Tensor]]
    strides: tuple[tuple[int, ...], ...]

    @property
    def works(self) -> tuple[KernelWork, ...]:
        """Return the work of the section's kernels, if it was priced instead of compiled."""
        return getattr(self.function, "works", ())

    def __call__(self, operands: list[Tensor]) -> Sequence[Tensor]:
        for i, (operand, stride) in enumerate(zip(operands, self.strides, strict=True)):
            if operand.stride() != stride and not _same_order(operand, stride):
                operands[i] = torch.empty_strided(
                    operand.shape, stride, dtype=operand.dtype, device=operand.device
                ).copy_(operand)
        return self.function(operands)


def _same_order(tensor: Tensor, stride: tuple[int, ...]) -> bool:
    """Return whether strides differ only in dimensions of size 1, or the tensor is empty."""
    return 0 in tensor.shape or all(
        size == 1 or step == other for size, step, other in zip(tensor.shape, tensor.stride(), stride, strict=True)
    )


@dataclass(frozen=True)
class _CompiledSection:
    """A compiled section, in the names of its region's graphs. ``shares``: the operand aliased by each result."""

    kernels: CompiledKernels
    operands: tuple[str, ...]
    results: tuple[str, ...]
    forms: tuple[Form, ...]
    shares: tuple[str | None, ...]


# The sections of half a region, and its outputs in the order of ``CompileRegion.outputs`` or ``CompileRegion.results``.
_CompiledHalf = tuple[list[_CompiledSection], tuple[str, ...]]


def compiled_program(
    program: RankProgram,
    ranks: Communicator,
    device: torch.device,
    on_host: frozenset[str] = frozenset(),
    generate: Generate | None = None,
) -> RankProgram:
    """Return the program with its kernels compiled. ``generate``: compiles a section (default: Inductor)."""
    with show_progress_once("compiling a program"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch(\.|$)")  # warnings of Inductor's import
        return _Compiler(program, ranks, device, on_host, generate or compile_with_inductor).run()


def with_every_cotangent(program: RankProgram, present: Sequence[bool], reached: Iterable[str]) -> RankProgram:
    """Return the program for cotangents of some delivered values, with zeros for the others. ``reached``: the sources
    that get gradients from these; the others get none."""
    zeros: list[Instruction] = []
    cotangents = list(program.cotangents)
    for i, (name, is_present) in enumerate(zip(program.cotangents, present, strict=True)):
        if name is not None and not is_present:
            form = program.forms[name]
            kwargs = (("dtype", form.dtype), ("device", None))
            origin = Origin("", "", "input")
            zeros.append(Compute(aten.zeros.default, (form.shape,), kwargs, (name,), ((),), (form,), (None,), origin))
            cotangents[i] = None
    gradients = {source: program.gradients[source] for source in reached}
    backward = (*zeros, *program.backward)
    return replace(program, backward=backward, cotangents=tuple(cotangents), gradients=gradients)


@dataclass
class _Compiler:
    program: RankProgram
    ranks: Communicator
    device: torch.device
    on_host: frozenset[str]
    generate: Generate
    kinds: dict[object, tuple[_CompiledHalf, _CompiledHalf]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of values replaced by another

    def run(self) -> RankProgram:
        divided = divide(self.program, self._is_kernel)
        program = self.program = divided.program
        halves = [self._compiled(region) for region in divided.regions]
        forms = dict(program.forms)
        placed = [self._placed(i, region, halves[i], forms) for i, region in enumerate(divided.regions)]
        self.names = {name: self._name(name) for name in self.names}  # without chains
        forward, backward = (
            tuple(_instruction(item, [halves[i] for halves in placed]) for item in items)
            for i, items in enumerate((divided.forward, divided.backward))
        )
        program = renamed(replace(program, forward=forward, backward=backward, forms=forms), self.names)
        computed = {name for instruction in program.forward for name in instruction.results} | set(program.taken)
        read = (name for instruction in program.backward for name in instruction.operands)
        saved = tuple(name for name in dict.fromkeys((*read, *program.gradients.values())) if name in computed)
        aliases = {name: self._name(other) for name, other in program.aliases.items()} | self.names
        return replace(program, saved=saved, aliases=aliases)

    def _is_kernel(self, instruction: Instruction) -> bool:
        """Return whether to compile it: no call with autograd inside, nothing on the host, no rows whose number changes
        from step to step (compiled kernels are for fixed sizes)."""
        if instruction.origin.op in self.program.spmd.keyed_operators:
            return False
        if self.on_host.intersection((*instruction.results, *instruction.operands)):
            return False
        return isinstance(instruction, Convert) or isinstance(
            getattr(instruction, "target", None), torch._ops.OpOverload
        )

    def _name(self, name: str) -> str:
        while name in self.names:
            name = self.names[name]
        return name

    def _compiled(self, region: CompileRegion) -> tuple[_CompiledHalf, _CompiledHalf]:
        key = kind_of(region, self.program)
        if key not in self.kinds:
            self.kinds[key] = _compile_region(self, region)
        return self.kinds[key]

    def _placed(
        self, number: int, region: CompileRegion, halves: tuple[_CompiledHalf, _CompiledHalf], forms: dict[str, Form]
    ) -> tuple[list[Compute], list[Compute]]:
        names = dict(zip(_numbered("primals", region.inputs), region.inputs, strict=True))
        names |= dict(zip(_numbered("tangents", region.late), region.late, strict=True))
        sections = []
        sides: tuple[tuple[_CompiledHalf, Sequence[str], str, Part], ...] = (
            (halves[0], region.outputs, ".", "forward"),
            (halves[1], region.results, "'", "input"),
        )
        for (compiled, returned), ends, mark, part in sides:
            computed = {name for section in compiled for name in section.results}
            end_of: dict[str, str] = {}
            for node, end in zip(returned, ends, strict=True):
                if node in computed and node not in end_of:
                    end_of[node] = end
                elif node in computed:
                    self.names[end] = end_of[node]
                else:
                    self.names[end] = names[node]
            for node in computed:
                end_of.setdefault(node, f"region {number}{mark}{node}")
            names |= end_of
            instructions = []
            for section in compiled:
                results = tuple(names[node] for node in section.results)
                forms.update(zip(results, section.forms, strict=True))
                instructions.append(
                    Compute(
                        section.kernels,
                        tuple(Ref(names[node]) for node in section.operands),
                        (),
                        results,
                        tuple((i,) for i in range(len(results))),
                        section.forms,
                        tuple(None if node is None else names[node] for node in section.shares),
                        Origin(f"region {number}", "", part),
                    )
                )
            sections.append(instructions)
        return sections[0], sections[1]


def _instruction(item: SectionIndex | Instruction, placed: Sequence[Sequence[Compute]]) -> Instruction:
    if isinstance(item, SectionIndex):
        return placed[item.region][item.section]
    # A section's result may be saved for backward under another name, so nothing is reduced in place.
    return replace(item, overwrites=False) if isinstance(item, (Convert, Depart)) else item


def _numbered(prefix: str, names: Sequence[str]) -> list[str]:
    """Return the names that ``make_fx`` gives the items of a list."""
    return [f"{prefix}_{i}" for i in range(1, len(names) + 1)]


def _compile_region(compiler: _Compiler, region: CompileRegion) -> tuple[_CompiledHalf, _CompiledHalf]:
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    program, device = compiler.program, compiler.device
    fake_mode = FakeTensorMode()
    with torch.inference_mode(False), torch.no_grad():
        with fake_mode:
            primals = [_empty(program.forms[name], device) for name in region.inputs]
            tangents = [_empty(program.forms[name], device) for name in region.late]
            joint = _traced(compiler, region, primals, tangents)
        with _inductor_context(fake_mode):
            joint = joint_graph_passes(joint)
        static = {source.value for source in program.spmd.graph.sources if source.kind == "parameter"}
        static |= {*program.given}
        if region.backward and region.forward:
            forward, backward = min_cut_rematerialization_partition(
                joint,
                [*primals, *tangents],
                num_fwd_outputs=len(region.outputs),
                static_lifetime_input_indices=[i for i, name in enumerate(region.inputs) if name in static],
            )
        elif region.forward:
            forward, backward = joint, _nothing()
        else:
            forward, backward = _nothing(), joint
        reads = [
            [frozenset(name for kernel in section for name in kernel.operands) for section in half]
            for half in (region.forward, region.backward)
        ]
        first_read = {
            node: next((i for i, names in enumerate(reads[half]) if name in names), 0)
            for half, prefix, ends in ((0, "primals", region.inputs), (1, "tangents", region.late))
            for node, name in zip(_numbered(prefix, ends), ends, strict=True)
        }
        values = {node.name: node.meta["val"] for node in forward.graph.nodes if node.op == "placeholder"} | dict(
            zip(_numbered("tangents", region.late), tangents, strict=True)
        )
        cut = _SectionCompiler(compiler.generate, fake_mode, first_read, values)
        first = cut.half(forward, "forward", len(region.forward), len(region.outputs))
        second = cut.half(backward, "backward", len(region.backward), len(region.results))
    return first, second


def _empty(form: Form, device: torch.device) -> Tensor:
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=device)


def _nothing() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)


def _traced(
    compiler: _Compiler, region: CompileRegion, primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> fx.GraphModule:
    """Trace both halves as one graph of operators that Inductor supports. Nodes are tagged with their section
    (``_section_of``)."""
    from torch._inductor import lowering  # noqa: F401  (decompositions use it and do not import it; takes long)
    from torch._inductor.decomposition import select_decomp_table

    sections = [("forward", i, section) for i, section in enumerate(region.forward)]
    sections += [("backward", i, section) for i, section in enumerate(region.backward)]
    writer = ModuleWriter(compiler.program, compiler.ranks, compiler.ranks, compiler.device, frozenset())
    parts = [((half, i), section) for half, i, section in sections]
    module = writer.kernels(parts, (*region.inputs, *region.late), (*region.outputs, *region.results))

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        return list(fx.Interpreter(module).run(*primals, *tangents))

    decompositions = {**select_decomp_table(), dropout._opoverload: decomposed_dropout}
    with fx_traceback.preserve_node_meta():
        traced: fx.GraphModule = make_fx(
            torch.func.functionalize(joint), decomposition_table=decompositions, tracing_mode="real"
        )(list(primals), list(tangents))
    traced.graph.set_codegen(fx.graph.CodeGen())
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


@contextlib.contextmanager
def _inductor_context(fake_mode: FakeTensorMode) -> Iterator[None]:
    from torch._inductor.virtualized import V

    with V.set_fake_mode(fake_mode), tracing(TracingContext(fake_mode)):
        yield


@dataclass
class _SectionCompiler:
    """Cuts halves into sections and compiles them. ``first_read``: placeholder -> the first section that reads it;
    ``values``: fake tensors of the values so far."""

    generate: Generate
    fake_mode: FakeTensorMode
    first_read: Mapping[str, int]
    values: dict[str, Tensor]

    def half(self, module: fx.GraphModule, half: str, num_sections: int, num_returned: int) -> _CompiledHalf:
        output: Any = module.graph.output_node()
        ends: list[fx.Node] = list(output.args[0])
        place = _places(module.graph, half, num_sections, self.first_read)
        parts = []
        for section in range(num_sections):
            called = [node for node in module.graph.nodes if place.get(node) == section]
            constants = dict.fromkeys(n for node in called for n in node.all_input_nodes if n.op == "get_attr")
            nodes = [*constants, *called]
            inside = set(nodes)
            outputs = [
                node
                for node in called
                if node in ends or any(place.get(user, section) != section for user in node.users)
            ]
            operands = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
            part = _subgraph(module, nodes, operands, outputs)
            fakes = [self.values[node.name] for node in operands]
            fixed = [i for i, node in enumerate(outputs) if node in ends[:num_returned]]
            with self.fake_mode:
                values = fx.Interpreter(part).run(*fakes)
            function, strides = self.generate(part, fakes, fixed)
            results = [
                fake if stride is None or stride == fake.stride() else fake.as_strided(fake.shape, stride)
                for fake, stride in zip(values, strides, strict=True)
            ]
            storage = {storage_of(fake): node.name for node, fake in reversed(list(zip(operands, fakes, strict=True)))}
            kernels = CompiledKernels(function, tuple(tuple(fake.stride()) for fake in fakes))
            names = tuple(node.name for node in outputs)
            forms = tuple(Form.of(fake) for fake in results)
            shares = []
            for node, fake in zip(outputs, values, strict=True):
                shares.append(storage.get(storage_of(fake)))
                storage.setdefault(storage_of(fake), node.name)
            parts.append(_CompiledSection(kernels, tuple(node.name for node in operands), names, forms, tuple(shares)))
            self.values.update(zip(names, results, strict=True))
        return parts, tuple(node.name for node in ends[:num_returned])


def _places(graph: fx.Graph, half: str, num_sections: int, first_read: Mapping[str, int]) -> dict[fx.Node, int]:
    """Assign a section to every node: its instruction's, or a later one that its operands need. A value recomputed in
    backward goes where it is first read."""
    first: dict[fx.Node, int] = {}  # the section in which it is available
    waits: set[fx.Node] = set()  # nodes that need a value computed in this half
    place: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            first[node] = first_read.get(node.name, 0) if half == "forward" or node.name.startswith("tangents") else 0
            if half == "forward" or node.name.startswith("tangents"):
                waits.add(node)
        elif node.op == "get_attr":  # every section gets a copy
            first[node] = 0
        elif node.op == "call_function":
            section = _section_of(node, half)
            first[node] = max([section or 0, *(first[operand] for operand in node.all_input_nodes)])
            if section is not None or waits.intersection(node.all_input_nodes):
                waits.add(node)
            place[node] = first[node]
    for node in reversed(graph.nodes):
        if node in place and node not in waits:
            place[node] = min((place[user] for user in node.users if user in place), default=num_sections - 1)
    return place


def _section_of(node: fx.Node, half: str) -> int | None:
    origin = (node.meta.get("custom") or {}).get("section")
    return origin[1] if origin is not None and origin[0] == half else None


def _subgraph(
    module: fx.GraphModule, nodes: Iterable[fx.Node], operands: Iterable[fx.Node], outputs: Iterable[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for operand in operands:
        copies[operand] = graph.placeholder(operand.name)
        copies[operand].meta = dict(operand.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(module, graph)


def compile_with_inductor(
    module: fx.GraphModule, operands: Sequence[Tensor], fixed: Sequence[int]
) -> tuple[Callable[[list[Tensor]], Sequence[Tensor]], Sequence[tuple[int, ...] | None]]:
    """Compile with Inductor. Results that only other sections read get the strides Inductor prefers."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    fake_mode = next((t.fake_mode for t in operands), None) or FakeTensorMode()  # type: ignore[attr-defined]
    output: Any = module.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(fixed)
    with _inductor_context(fake_mode), TracingContext.report_output_strides() as reported:
        # Not Inductor's CUDA graphs, which a user may have on for other models: sections get new addresses in every
        # step, or are captured together (``runtime.cuda_graphs``).
        function: Any = compile_fx_inner(module, list(operands), cudagraphs=BoxedBool(False))
    strides = [None if stride is None else tuple(map(int, stride)) for stride in reported or ()]
    return function, strides or [None] * len(output.args[0])
