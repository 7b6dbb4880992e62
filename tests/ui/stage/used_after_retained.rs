use qeffect::model::*;

#[retained]
struct Tape {
    x: Kept,
}

#[allow(non_camel_case_types)]
struct twice {}

#[stage]
impl PureOp for twice {
    type Param<'a> = ();
    type Tape = Tape;

    fn forward(cx: &mut Cx<'_>, x: Act, (): ()) -> Result<(Act, Tape)> {
        let kept = cx.keep(x)?;
        let tape = Tape { x: kept };
        cx.release(kept)?;
        Ok((cx.add(x, x)?, tape))
    }

    fn input_grad(cx: &mut Cx<'_>, dy: Act, (): (), tape: Tape) -> Result<Act> {
        tape.release(cx)?;
        let dx = cx.add(dy, dy)?;
        tape.release(cx)?;
        Ok(dx)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, (): ()) -> Result<Act> {
        cx.add(x, x)
    }
}

fn main() {}
