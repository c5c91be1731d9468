"""Apply rules.toml to a module: one walk over its nodes finds what breaks a rule, and what surely mends
it."""

import ast
import re

from tpukit_tools.migrate.findings import TABLES
from tpukit_tools.migrate.launches import Launches
from tpukit_tools.migrate.slices import Slices
from tpukit_tools.migrate.source import Located, Source, parse
from tpukit_tools.migrate.surroundings import Surroundings
from tpukit_tools.migrate.syncs import syncs

# Rules that code which runs only on CUDA cannot break.
NOT_ON_CUDA = {"cuda", "cuda-check", "fp16", "data-parallel", "torch-compile"}
# The modules that new code needs: torch_xla.runtime of torch_xla.runtime.world_size(), torch_xla of "xla".
MODULES = re.compile(r"\b(torch_xla(?:\.\w+)*)\.\w|\b(torch)\.\w|[\"']xla[\"']")


class Checker:
    """findings: (line, column in UTF-8, rule, found, advice, fixable), in no order. fixed: the code with all
    fixes, and with the imports that they need."""

    def __init__(self, code: str):
        self.source = Source(code)
        self.around = Surroundings(self.source)
        self.findings = []
        self.edits = []  # (start, end, new text), in bytes of the code
        self.unsure = {}  # an edit -> (its finding, a pattern that no fixed code may have; see rules.toml)
        self.unsynced = {}  # a finding of an update of weights without a sync -> the call
        self.covered = set()  # (node, a rule that is not reported again in it, or "" for all of them)
        names = {self.source.name(node) for node in self.source.nodes}
        self.text = "\n".join([ast.unparse(self.source.tree), *names])
        for call in Launches(self.source).too_early:
            self._add(call, dict(rule="launch"))
        for node in Slices(self.source, self.around).found:
            self._add(node, dict(rule="slice-in-loop"))
        for node in self.source.nodes:  # an outer one before what is in it
            self._check(node)
        for call in self.source.calls:  # last: what asks for CUDA may be a part of a device's name
            self._check_condition(call)
        self._check_device()
        self._sync()
        self._take_back()
        self.fixed = self._apply([*self.edits, *self._imports()])

    def _check(self, node):
        match node:
            case ast.Import() | ast.ImportFrom():
                self._check_import(node)
            case ast.Name() | ast.Attribute():
                self._check_name(node)
            case ast.Constant() | ast.JoinedStr():
                self._check_word(node)
            case ast.Call():
                self._check_call(node)
            case ast.Subscript(ctx=ast.Load()):  # `x[mask] = 0` keeps its shape
                self._check_mask(node)
            case ast.IfExp() if re.fullmatch(TABLES["chooses_cpu"]["text"], ast.unparse(node)):
                self._add(node, TABLES["chooses_cpu"])
            case ast.Assign() if self.around.is_tied_before_the_move(node):
                self._add(node, dict(rule="untied"))
            case ast.AugAssign() if self.around.changes_weights(node):  # weights -= rate * weights.grad
                [entry] = [
                    one for one in TABLES["patterns"]["calls"] if one.get("where") == "changes_weights"
                ]
                if self._holds(entry):
                    self._add(node, entry)

    # Names

    def _check_import(self, node):
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            entry = self._entry_of(f"{module}{alias.name}")
            if entry and "called" not in entry:
                self._add(node, entry, found=f"`import {alias.name}`")

    def _check_name(self, node):
        """Check `torch.float16`, `xm.xrt_world_size`, `torch.cuda.synchronize`."""
        parent = self.source.parents[node]
        if isinstance(parent, ast.Attribute | ast.Dict | ast.Compare):  # a part of a name, or only named
            return
        name = self.source.name(node)
        entry = self._entry_of(name)
        call = parent if isinstance(parent, ast.Call) and parent.func is node else None
        is_called = call is not None
        if entry is None or entry.get("called", is_called) != is_called or self.around.cuda_condition(node):
            return
        use = entry.get("use", "")
        if is_called and call.keywords:  # the new name may have others: `xla_device(devkind="TPU")`
            use = ""
        elif is_called and use.endswith(")"):  # takes the place of a call without arguments
            node, use = call, "" if call.args else use
        self._add(node, entry, found=f"`{name}`", use=use)

    def _entry_of(self, name):
        """Return the table's entry for a full name; None if nothing is wrong with it here."""
        for start, entry in TABLES["names"].items():
            if re.match(r"({})(\.|$)".format(start.replace(".", r"\.")), name):
                advice = dict(advice=f"use {entry['use']}") if "use" in entry else {}
                return advice | entry if entry and self._holds(entry) else None
        return None

    def _holds(self, entry):
        """Return whether an entry's condition on the whole module holds."""
        return "unless" not in entry or re.search(entry["unless"], self.text) is None

    # Words

    def _check_word(self, word):
        """Check `"cuda"` where it names a device, and `True` of fp16=True."""
        text = ast.unparse(word)
        entries = [entry for entry in TABLES["patterns"]["words"] if re.fullmatch(entry["word"], text)]
        if not entries or isinstance(self.source.parents[word], ast.JoinedStr):
            return
        node = self._formatted(word)
        place = self._place_of(node)
        while (outer := self._device_expression(node)) is not None:
            node, place = outer, f"{place} in {self._place_of(outer)}"
        for entry in entries:
            if re.fullmatch(entry["place"], place) and self._holds(entry):
                self._add(node, entry, use=entry.get("use", ""))
                return

    def _formatted(self, word):
        """Return the call in which a text is formatted, "cuda:{}".format(rank), or the text alone."""
        parent = self.source.parents[word]
        return self.source.parents[parent] if getattr(parent, "attr", "") == "format" else word

    def _device_expression(self, node):
        """Return what names one device together with a node: torch.device(node), "cuda:" + str(i), "cuda" if
        use_cuda else "cpu"."""
        match parent := self.source.parents[node]:
            case ast.BinOp():
                return parent
            case ast.IfExp() if node is not parent.test and not self.around.mentions_xla(parent):
                return parent if self.around.kind_of(parent.test) != "knows" else None
            case ast.Call() if node is not parent.func and self.source.name(parent.func) == "torch.device":
                return parent
        return None

    def _place_of(self, node):
        """Return where a value goes: "torch.zeros(device)" or ".to()", "device =" or "return"."""
        owner, keyword = self.source.parents[node], ""
        if isinstance(owner, ast.keyword):
            owner, keyword = self.source.parents[owner], owner.arg or ""
        match owner:
            case ast.Call():
                return f"{self.source.name(owner.func)}({keyword})"
            case ast.Assign(targets=[target, *_]) | ast.AnnAssign(target=target):
                return f"{ast.unparse(target)} ="
            case ast.arguments():
                return f"{ast.unparse(owner)} ="
            case ast.Subscript(ctx=ast.Load()):
                return "read"
            case ast.Dict() if node in owner.values:
                return f"{ast.unparse(owner.keys[owner.values.index(node)] or owner)} ="
        return type(owner).__name__.lower()

    # Calls

    def _check_call(self, call):
        called = self.source.name(call.func)
        for entry in TABLES["patterns"]["calls"]:
            if re.fullmatch(entry["call"], called) is None or not self._holds(entry):
                continue
            values = dict(zip(entry.get("positions", "").split(), call.args))
            values |= {arg.arg or "**": arg.value for arg in call.keywords}
            texts = {name: ast.unparse(value) for name, value in values.items()}
            conditions = [getattr(self.around, name) for name in entry.get("where", "").split()]
            if _has(call, texts, entry.get("when", {})) and all(condition(call) for condition in conditions):
                use = re.sub(r"\{(\w+)\}", lambda found: _argument(found[1], texts), entry.get("use", ""))
                self._add(values.get(entry.get("at"), call), entry, use=use)

    # What no table says

    def _check_mask(self, node):
        """Check `x[mask]`."""
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if any(map(self.around.is_mask, indices)) and self.around.in_compiled_code(node):
            self._add(node, dict(rule="dynamic-shape"))

    def _check_condition(self, call):
        """Check `torch.cuda.is_available()`."""
        if self.source.name(call.func) in TABLES["asks_for_cuda"]:
            if re.fullmatch(TABLES["harmless_after_it"], ast.unparse(self.source.parents[call])) is None:
                self._add(call, dict(rule="cuda-check"))

    def _check_device(self):
        """Check that a file which runs a model chooses an XLA device somewhere, or has been told to."""
        tree = self.source.tree
        told = {rule for _, _, rule, *_ in self.findings} & {"cuda", "library"}
        knows_xla = re.search(TABLES["knows_xla"], self.text)
        if told or knows_xla or not re.search("torch|[tT]rain|[lL]earner", self.text):
            return
        is_script = "'__main__'" in self.text
        runs = is_script or any(
            isinstance(one, ast.For | ast.While | ast.With) or _calls(one) for one in tree.body
        )
        for call in self.source.calls:
            name = self.source.name(call.func)
            is_outside = is_script or self.source.function_of(call) is self.source.tree
            if re.fullmatch(TABLES["trains"], name) or is_outside and re.fullmatch(TABLES["predicts"], name):
                self._add(call, dict(rule="no-device" if runs or is_outside else "device-elsewhere"))
                return

    # Findings and fixes

    def _add(self, node: Located, entry: dict, *, found: str = "", use: str = ""):
        """Add a finding, unless it is in what another one covers, or its code runs only on CUDA.

        use: what fixes it, in the node's place, or in that of the method called if it begins with a dot."""
        rule, advice = entry["rule"], entry.get("advice", "")
        condition = self.around.cuda_condition(node) if rule in NOT_ON_CUDA else ""
        if condition == "asks" and rule == "cuda":
            advice = "torch.cuda.is_available() is false on a TPU: this is skipped, and the CPU trains"
            use = ""
        elif condition or self.around.is_without_xla(node):
            return
        if rule == "library" and any(one[2] == rule and one[4] == advice for one in self.findings):
            return
        outers = list(self.source.ancestors(node))
        if not self.covered.isdisjoint((outer, one) for outer in [node, *outers] for one in (rule, "")):
            return
        start, end = self.source.start(node), self.source.end(node)
        if use.startswith("."):
            found = f"`.{node.func.attr}()` of `{ast.unparse(node.func.value)[:40]}`"
            start = self.source.end(node.func) - len(f".{node.func.attr}")
            self.covered.add((node, rule))
        else:
            named = outers[0] if isinstance(outers[0], ast.keyword) else node  # fp16=True, not True
            found = found or f"`{_short(named)}`"
            self.covered.add((node, "" if use or isinstance(node, ast.IfExp) else rule))
        if any(isinstance(outer, ast.JoinedStr) for outer in outers):
            # Older Pythons know no place in it, and a fix does not know its quotes.
            node, use = next(outer for outer in outers if isinstance(outer, ast.JoinedStr)), ""
        finding = (node.lineno, node.col_offset + 1, rule, found, advice, bool(use))
        self.findings.append(finding)
        if rule == "no-sync":
            self.unsynced[finding] = node
        self.edits += [(start, end, use)] if use else []
        if use and "unless_left" in entry:
            self.unsure[start, end, use] = finding, entry["unless_left"]

    def _sync(self):
        """Insert the syncs that training steps lack, in a file that chooses an XLA device, or does once it is
        fixed."""
        if self.unsynced and re.search(TABLES["knows_xla"], self._apply(self.edits) + self.text):
            edits = syncs(self.source, self.around, list(self.unsynced.values()))
            self.edits += edits
            fixed = self.unsynced if edits else ()
            self.findings = [(*one[:5], True) if one in fixed else one for one in self.findings]

    def _take_back(self):
        """Leave out the fixes that are right only if the others fix all of something."""
        if not self.unsure:
            return
        fixed = ast.unparse(parse(self._apply([one for one in self.edits if one not in self.unsure])))
        for edit, (finding, pattern) in self.unsure.items():
            others = [one for one in self.findings if one[2] == finding[2] and one[5]]
            sure = len(others) > sum(one[0][2] == finding[2] for one in self.unsure.values())
            if not sure or re.search(pattern, fixed):
                self.edits.remove(edit)
                self.findings[self.findings.index(finding)] = (*finding[:5], False)

    def _apply(self, edits):
        parts, end = [], 0
        for start, stop, text in sorted(edits, key=lambda edit: edit[:2]):
            if start >= end:  # else it is in what another one replaces
                parts += [self.source.code[end:start].decode(), text]
                end = stop
        return "".join([*parts, self.source.code[end:].decode()])

    def _imports(self):
        """Edits that import what is not imported yet: above the first import, or below the docstring."""
        found = [match for _, _, text in self.edits for match in MODULES.finditer(text)]
        modules = {match[1] or match[2] or "torch_xla" for match in found}
        tree = self.source.tree
        body: list[Located] = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
        body = [one for one in body if getattr(one, "module", "") != "__future__"]
        # Lines for IPython are read as such: %%time has to stay the first of its cell.
        body = [one for one in body if not isinstance(one, ast.Pass)] or body
        plain = [alias for one in body if isinstance(one, ast.Import) for alias in one.names]
        there = {alias.name for alias in plain if not alias.asname}
        imports = [one for one in body if isinstance(one, ast.Import | ast.ImportFrom)]
        for first in (imports or body)[:1]:
            start = self.source.starts[first.lineno - 1]
            for module in sorted(modules - there):
                yield start, start, f"import {module}\n"


def _has(call, texts, when):
    """Return whether each argument is as `when` says. What `**` may hold is unknown."""
    if when and any(isinstance(one, ast.Starred) for one in call.args):
        return False
    if "**" in texts and not when.keys() <= texts.keys():
        return False
    return all(re.fullmatch(pattern, texts.get(name, "None")) for name, pattern in when.items())


def _argument(name, texts):
    """Return the keyword argument that takes an argument over into new code; "" if it is not given."""
    return f", {name}={texts[name]}" if name in texts else ""


def _calls(statement):
    """Return whether a statement is a call alone, `train()`."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)


def _short(node):
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."
