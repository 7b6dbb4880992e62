"""Random bodies of stages, each also as a program over a tape, for `qeffect-runtime/tests/models/stage_bodies.rs`.

Usage: python3 scripts/stage_bodies.py > qeffect-runtime/tests/models/stage_bodies/bodies.rs
"""

import random

BODIES, SEED = 20, 20

HEAD = """// Written by `scripts/stage_bodies.py`: random bodies, as stages and as programs over a tape.

use super::*;
"""


class Body:
    """One body: lines of the stage and of the program over a tape, side by side."""

    def __init__(self, rng):
        self.rng = rng
        self.stage, self.tape = [], []
        self.linears = self.norms = 0
        self.fresh = 0
        self.open = ["x"]  # names whose value nothing has used yet
        self.known = ["x"]

    def operand(self):
        """A name, unused ones first."""
        pool = self.open if self.open and self.rng.random() < 0.7 else self.known
        name = self.rng.choice(pool)
        if name in self.open:
            self.open.remove(name)
        return name

    def expression(self, depth):
        """Nested calls: text for the stage and for the tape."""
        kind = self.rng.choice(["linear", "linear", "gelu", "silu", "norm", "add", "add", "name"])
        if depth == 0:
            kind = "name"
        if kind == "linear" and self.linears < 6:
            p = f"l{self.linears}"
            self.linears += 1
            inner = self.expression(depth - 1)
            return f"linear({inner[0]}, &w.{p})", f"{{ let a = {inner[1]}; g.linear(a, \"{p}\") }}"
        if kind in ("gelu", "silu"):
            inner = self.expression(depth - 1)
            return f"{kind}({inner[0]})", f"{{ let a = {inner[1]}; g.{kind}(a) }}"
        if kind == "norm" and self.norms < 3:
            p = f"n{self.norms}"
            self.norms += 1
            inner = self.expression(depth - 1)
            return f"layer_norm({inner[0]}, &w.{p})", f"{{ let a = {inner[1]}; g.norm(a, \"{p}\") }}"
        if kind == "add":
            a, b = self.expression(depth - 1), self.expression(depth - 1)
            return f"add({a[0]}, {b[0]})", f"{{ let a = {a[1]}; let b = {b[1]}; g.add(a, b) }}"
        name = self.operand()
        return name, name

    def call(self):
        while True:
            state = (self.linears, self.norms, list(self.open))
            stage, tape = self.expression(3)
            if "(" in stage:
                return stage, tape
            self.linears, self.norms, self.open = state

    def bind(self, name):
        if name not in self.known:
            self.known.append(name)
        if name not in self.open:
            self.open.append(name)

    def name(self):
        """A new name, or one that is used up: shadowing."""
        used = [name for name in self.known if name not in self.open]
        if used and self.rng.random() < 0.4:
            return self.rng.choice(used)
        self.fresh += 1
        return f"v{self.fresh}"

    def both(self, line):
        self.stage.append(line)
        self.tape.append(line)

    def statement(self):
        kind = self.rng.choice(["let", "let", "let", "tuple", "if", "loop"])
        if kind == "let":
            stage, tape = self.call()
            name = self.name()
            self.stage.append(f"let {name} = {stage};")
            self.tape.append(f"let {name} = {tape};")
            self.bind(name)
        elif kind == "tuple":
            one, two = self.call(), self.call()
            self.fresh += 2
            a, b = f"v{self.fresh - 1}", f"v{self.fresh}"
            self.stage.append(f"let ({a}, {b}) = ({one[0]}, {two[0]});")
            self.tape.append(f"let ({a}, {b}) = ({one[1]}, {two[1]});")
            self.bind(a)
            self.bind(b)
        elif kind == "if":
            a, b = self.operand(), self.operand()
            name = self.name()
            flag = self.rng.choice(["yes", "no"])
            self.stage.append(f"let {name} = if w.{flag} {{ add(gelu({a}), {b}) }} else {{ add({a}, silu({b})) }};")
            self.tape.append(
                f"let {name} = if w.{flag} {{ let a = g.gelu({a}); g.add(a, {b}) }}"
                f" else {{ let b = g.silu({b}); g.add({a}, b) }};"
            )
            self.bind(name)
        else:
            self.loop()

    def loop(self):
        """Once per body: a parameter has one gradient."""
        if not any("for layer" in line for line in self.stage):
            start = self.operand()
            self.fresh += 1
            name = f"v{self.fresh}"
            self.both(f"let mut {name} = {start};")
            self.stage.append(f"for layer in &w.layers {{ {name} = add(gelu(linear({name}, layer)), {name}); }}")
            self.tape.append(
                f"for layer in 0..w.layers.len() {{ let a = g.linear({name}, &format!(\"layers.{{layer}}\"));"
                f" let a = g.gelu(a); {name} = g.add(a, {name}); }}"
            )
            self.bind(name)

    def finish(self):
        self.loop()
        stage = tape = self.operand()
        while self.open:
            other = self.operand()
            stage, tape = f"add({stage}, {other})", f"{{ let a = {tape}; g.add(a, {other}) }}"
        # Every parameter gets a gradient, or the step is refused.
        for p in [f"l{n}" for n in range(self.linears, 6)]:
            stage, tape = f"linear({stage}, &w.{p})", f"{{ let a = {tape}; g.linear(a, \"{p}\") }}"
        for p in [f"n{n}" for n in range(self.norms, 3)]:
            stage, tape = f"layer_norm({stage}, &w.{p})", f"{{ let a = {tape}; g.norm(a, \"{p}\") }}"
        self.stage.append(f"gelu({stage})")
        self.tape.append(f"{{ let a = {tape}; g.gelu(a) }}")


def main():
    rng = random.Random(SEED)
    print(HEAD)
    names = []
    for index in range(BODIES):
        body = Body(rng)
        for _ in range(rng.randint(2, 8)):
            body.statement()
        body.finish()
        name = f"body{index}"
        names.append(name)
        lines = "\n    ".join(body.stage)
        print(f"#[stage(crate = qeffect_runtime)]\nfn {name}(x: Act, w: &Parts) -> Act {{\n    {lines}\n}}\n")
        lines = "\n    ".join(body.tape)
        print(f"fn {name}_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {{\n    let _ = w;\n    {lines}\n}}\n")
    print("#[test]\nfn all() {")
    for name in names:
        print(f'    compare::<{name}>("{name}", {name}_on_tape);')
    print("}")


main()
