use qeffect::model::*;
use qeffect::runtime::stage::CellId;

struct Cast {
    input: CellId,
    twice: bool,
}

#[retained]
struct Codes {
    x: Fp8,
}

#[allow(non_camel_case_types)]
struct cast {}

#[effect(write(input, grad_output))]
impl Op for cast {
    type Input = Act;
    type Output = Act;
    type Param<'a> = &'a Cast;
    type Tape = Codes;
    type Work = Codes;

    fn forward(cx: &mut Cx<'_>, x: Act, p: &Cast, token: Token<Fwd>) -> Result<(Act, Codes, Token<Fwd>)> {
        let mut quantise = |token| cx.quantise_input(x, p.input, token);
        let (x8, token) = quantise(token)?;
        Ok((cx.share(x)?, Codes { x: x8 }, token))
    }

    fn input_grad(
        cx: &mut Cx<'_>,
        dy: Act,
        p: &Cast,
        tape: Codes,
        token: Token<Bwd>,
    ) -> Result<(Act, Codes, Token<Bwd>)> {
        if p.twice && cx.quantise_grad(dy, p.input, token).is_ok() {
            return Err(Error::Config("twice".into()));
        }
        Ok((cx.share(dy)?, tape, cx.roll_backward(token)?))
    }

    fn weight_grad(cx: &mut Cx<'_>, _: &Cast, work: Codes) -> Result<()> {
        work.release(cx)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, _: &Cast) -> Result<Act> {
        cx.share(x)
    }
}

fn main() {}
