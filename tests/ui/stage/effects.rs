use qeffect::model::*;
use qeffect::runtime::stage::CellId;

struct Cast {
    input: CellId,
}

#[retained]
struct Codes {
    x: Fp8,
}

#[allow(non_camel_case_types)]
struct cast {}

#[effect(read(input), write(weights))]
impl Op for cast {
    type Input = Act;
    type Output = Act;
    type Param<'a> = &'a Cast;
    type Tape = Codes;
    type Work = Codes;

    fn forward(cx: &mut Cx<'_>, x: Act, p: &Cast, token: Token<Fwd>) -> Result<(Act, Codes, Token<Fwd>)> {
        let (x8, token) = cx.quantise_input(x, p.input, token)?;
        Ok((cx.share(x)?, Codes { x: x8 }, token))
    }

    fn input_grad(
        cx: &mut Cx<'_>,
        dy: Act,
        _: &Cast,
        tape: Codes,
        token: Token<Bwd>,
    ) -> Result<(Act, Codes, Token<Bwd>)> {
        Ok((cx.share(dy)?, tape, token))
    }

    fn weight_grad(cx: &mut Cx<'_>, _: &Cast, work: Codes) -> Result<()> {
        work.release(cx)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, _: &Cast) -> Result<Act> {
        cx.share(x)
    }
}

#[allow(non_camel_case_types)]
struct late {}

#[effect(read(input))]
impl Op for late {
    type Input = Act;
    type Output = Act;
    type Param<'a> = &'a Cast;
    type Tape = ();
    type Work = Codes;

    fn forward(cx: &mut Cx<'_>, x: Act, p: &Cast, token: Token<Fwd>) -> Result<(Act, (), Token<Fwd>)> {
        let (x8, token) = cx.quantise_input(x, p.input, token)?;
        cx.release_fp8(x8)?;
        Ok((cx.share(x)?, (), token))
    }

    fn input_grad(
        cx: &mut Cx<'_>,
        dy: Act,
        p: &Cast,
        (): (),
        token: Token<Bwd>,
    ) -> Result<(Act, Codes, Token<Bwd>)> {
        let x = cx.quantise_frozen(dy, p.input)?;
        Ok((cx.share(dy)?, Codes { x }, token))
    }

    fn weight_grad(cx: &mut Cx<'_>, p: &Cast, work: Codes) -> Result<()> {
        let (again, _) = cx.quantise_grad(work.x.codes(), p.input, token)?;
        cx.release_fp8(again)?;
        work.release(cx)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, _: &Cast) -> Result<Act> {
        cx.share(x)
    }
}

#[allow(non_camel_case_types)]
struct refreshed {}

#[effect(fold(weight))]
impl Op for refreshed {
    type Input = Act;
    type Output = Act;
    type Param<'a> = ();
    type Tape = ();
    type Work = ();

    fn forward(cx: &mut Cx<'_>, x: Act, (): (), token: Token<Fwd>) -> Result<(Act, (), Token<Fwd>)> {
        Ok((cx.share(x)?, (), token))
    }

    fn input_grad(cx: &mut Cx<'_>, dy: Act, (): (), (): (), token: Token<Bwd>) -> Result<(Act, (), Token<Bwd>)> {
        Ok((cx.share(dy)?, (), token))
    }

    fn weight_grad(_: &mut Cx<'_>, (): (), (): ()) -> Result<()> {
        Ok(())
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, (): ()) -> Result<Act> {
        cx.share(x)
    }
}

fn main() {}
