//! Cross-entropy against float64.

use half::bf16;

use crate::rig::{bits, close, numbers, rig, within};

#[test]
fn rows_and_their_mean() {
    let Some(rig) = rig() else { return };
    for (rows, vocabulary) in [(1, 1), (3, 17), (64, 256), (40, 1001), (256, 32_768), (2, 50_257), (3, 128_256)] {
        let logits: Vec<bf16> = numbers(1, rows * vocabulary).iter().map(|x| bf16::from_f32(x * 9.0)).collect();
        let targets: Vec<u32> = (0..rows).map(|row| (row * 7919 % vocabulary) as u32).collect();
        let (l, t) = (rig.upload(&logits), rig.upload(&targets));
        let (lse, losses) = (rig.poisoned::<f32>(rows), rig.poisoned::<f32>(rows));
        let (loss, flag) = (rig.poisoned::<f32>(1), rig.upload(&[0u32]));
        rig.kernels
            .cross_entropy_forward(
                &rig.stream,
                l.span(),
                t.span(),
                lse.span(),
                losses.span(),
                loss.span(),
                Some(flag.span()),
            )
            .unwrap();
        let want: Vec<f64> =
            logits.chunks(vocabulary).map(|row| row.iter().map(|x| x.to_f64().exp()).sum::<f64>().ln()).collect();
        close("lse", lse.read().unwrap(), &want, 1e-6);
        // A sum of a hundred terms per thread, and the rounding of its logarithm.
        let most = |row: usize| 1e-5 + 1e-6 * (want[row].abs() + 9.0);
        within("lse", lse.read().unwrap(), &want, most);
        let losses = losses.read().unwrap();
        let row_loss = |row: usize| want[row] - logits[row * vocabulary + targets[row] as usize].to_f64();
        let want_losses: Vec<f64> = (0..rows).map(row_loss).collect();
        if vocabulary > 1 {
            close("losses", losses.iter().copied(), &want_losses, 1e-6);
        }
        within("losses", losses.iter().copied(), &want_losses, most);
        let mean = losses.iter().fold(0.0, |sum, loss| sum + loss) / rows as f32;
        assert_eq!(bits(&loss.read().unwrap()), [mean.to_bits()], "rows are added in ascending order");
        assert_eq!(flag.read().unwrap(), [0]);
    }
}

#[test]
fn what_is_not_finite_and_what_is_no_token_raise_the_flag() {
    let Some(rig) = rig() else { return };
    for (bad, target) in [(f32::NAN, 1), (f32::INFINITY, 1), (0.0, 64), (0.0, u32::MAX)] {
        let mut logits = vec![bf16::ONE; 128];
        logits[70] = bf16::from_f32(bad);
        let (l, t) = (rig.upload(&logits), rig.upload(&[0u32, target]));
        let (lse, losses) = (rig.poisoned::<f32>(2), rig.poisoned::<f32>(2));
        let (loss, flag) = (rig.poisoned::<f32>(1), rig.upload(&[0u32]));
        rig.kernels
            .cross_entropy_forward(
                &rig.stream,
                l.span(),
                t.span(),
                lse.span(),
                losses.span(),
                loss.span(),
                Some(flag.span()),
            )
            .unwrap();
        assert_eq!(flag.read().unwrap(), [1], "{bad} {target}");
        assert!(losses.read().unwrap()[0].is_finite());
    }
}
