// SPDX-License-Identifier: MIT
//! Draws a pattern in the terminal:  cargo run --example draw -- "causal & (sink(64) | window(4095,0))" 65536
use sparseattn::{Pattern, Result};

const CELLS: usize = 40;

fn main() -> Result<()> {
    #[cfg(feature = "load")]
    // SAFETY: the library that the dynamic linker finds is the installed one.
    unsafe {
        sparseattn::load(None)?
    };
    let mut arguments = std::env::args().skip(1);
    let pattern: Pattern = arguments.next().as_deref().unwrap_or("causal & (sink(64) | window(4095,0))").parse()?;
    let seq = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(65536usize);
    let cells = CELLS.min(seq);
    let image = pattern.to_image(seq, 0, cells, cells)?;
    for row in image.chunks(cells) {
        let shades = row.iter().map(|kept| b" .:-=+*#%@"[(kept * 9.0).ceil() as usize] as char);
        println!("{}", shades.flat_map(|shade| [shade, shade]).collect::<String>());
    }
    let stats = pattern.stats(seq)?;
    println!(
        "{pattern} on {seq} tokens: {:.3} % kept, {} to {} keys",
        100.0 * stats.density,
        stats.row_min,
        stats.row_max
    );
    Ok(())
}
