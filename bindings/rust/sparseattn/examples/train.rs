// SPDX-License-Identifier: MIT
//! Trains a layer of attention to guess the next letter of a text, once where each letter sees itself alone and once
//! where it sees its neighbours too, which must make the better guesses:
//!
//!     cargo run --release --example train [-- TEXT.txt]
use sparseattn::{causal, window, Context, Gradients, Pattern, Plan, Problem, Result, Saved, View, ViewMut};

const BATCH: usize = 8;
const SEQ: usize = 64;
const HEADS: usize = 2;
const DIM: usize = 16;
const WIDTH: usize = HEADS * DIM;
const TOKENS: usize = BATCH * SEQ;
const SHAPE: [usize; 4] = [BATCH, SEQ, HEADS, DIM];
const LSE_SHAPE: [usize; 3] = [BATCH, HEADS, SEQ];
const STEPS: usize = 400;

fn main() -> Result<()> {
    #[cfg(feature = "load")]
    // SAFETY: the library that the dynamic linker finds is the installed one.
    unsafe {
        sparseattn::load(None)?
    };
    let text = match std::env::args().nth(1) {
        Some(path) => std::fs::read(&path).expect("the text cannot be read"),
        None => include_bytes!("prideprejudice.txt").to_vec(),
    };
    assert!(text.len() > SEQ + 1, "the text has fewer than {} letters", SEQ + 2);
    let mut letters = text.clone();
    letters.sort_unstable();
    letters.dedup();
    let text: Vec<usize> = text.iter().map(|letter| letters.binary_search(letter).unwrap()).collect();
    println!("{} letters, {} of them different", text.len(), letters.len());

    let alone = train(&window(0, 0), &text, letters.len())?;
    let together = train(&(causal() & window(15, 0)), &text, letters.len())?;
    println!("nats a letter: {alone:.2} alone, {together:.2} with its neighbours");
    assert!(together < alone - 0.1);
    Ok(())
}

/// The mean loss of the last steps.
fn train(pattern: &Pattern, text: &[usize], letters: usize) -> Result<f32> {
    let problem = Problem::new(BATCH, HEADS, SEQ, DIM).backward(true);
    let mut layer = Layer::new(Context::cpu()?.plan(pattern, &problem)?, letters);
    let (mut random, mut recent) = (Random(7), 0.0);
    for step in 1..=STEPS {
        let starts: Vec<usize> = (0..BATCH).map(|_| random.next() as usize % (text.len() - SEQ - 1)).collect();
        let part = |shift| -> Vec<usize> { starts.iter().flat_map(|s| &text[s + shift..][..SEQ]).copied().collect() };
        let loss = layer.learn(&part(0), &part(1), step)?;
        recent = if step == 1 { loss } else { 0.95 * recent + 0.05 * loss };
        if step % 100 == 0 {
            println!("{pattern}: step {step}, {recent:.3}");
        }
    }
    Ok(recent)
}

/// x = embed[letter] + place; h = x + attention(x q, x k, x v) out; letters = softmax(h guess).
struct Layer {
    plan: Plan,
    places: Vec<f32>,
    embed: Weights,
    q: Weights,
    k: Weights,
    v: Weights,
    out: Weights,
    guess: Weights,
}

impl Layer {
    fn new(plan: Plan, letters: usize) -> Self {
        // Waves of many lengths tell a letter's place, and products of them how far two letters are apart.
        let place = |i: usize| {
            let (t, d) = ((i / WIDTH % SEQ) as f32, i % WIDTH);
            (t / 64f32.powf((d / 2) as f32 / (WIDTH / 2) as f32) + (d % 2) as f32 * std::f32::consts::FRAC_PI_2).sin()
        };
        let mut random = Random(1);
        let mut weights = |rows: usize, columns: usize| Weights::new(rows, columns, &mut random);
        Layer {
            plan,
            places: (0..TOKENS * WIDTH).map(place).collect(),
            embed: weights(letters, WIDTH),
            q: weights(WIDTH, WIDTH),
            k: weights(WIDTH, WIDTH),
            v: weights(WIDTH, WIDTH),
            out: weights(WIDTH, WIDTH),
            guess: weights(WIDTH, letters),
        }
    }

    /// One step towards the letters that come next; the loss before it.
    fn learn(&mut self, input: &[usize], next: &[usize], step: usize) -> Result<f32> {
        let letters = self.guess.columns;
        let mut x = self.places.clone();
        for (row, letter) in x.chunks_mut(WIDTH).zip(input) {
            add(row, &self.embed.values[letter * WIDTH..][..WIDTH]);
        }
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|weights| weights.forward(&x));
        let (mut seen, mut lse) = (vec![0f32; TOKENS * WIDTH], vec![0f32; TOKENS * HEADS]);
        let [q, k, v] = [View::new(&q, &SHAPE)?, View::new(&k, &SHAPE)?, View::new(&v, &SHAPE)?];
        let lse_view = ViewMut::new(&mut lse, &LSE_SHAPE)?;
        self.plan.forward(q, k, v, ViewMut::new(&mut seen, &SHAPE)?).lse(lse_view).run()?;
        let mut h = self.out.forward(&seen);
        add(&mut h, &x);

        let mut dguess = self.guess.forward(&h); // scores of letters, then their gradients
        let mut loss = 0.0;
        for (row, next) in dguess.chunks_mut(letters).zip(next) {
            let most = row.iter().fold(f32::MIN, |a, b| a.max(*b));
            let sum: f32 = row.iter().map(|score| (score - most).exp()).sum();
            loss += (sum.ln() + most - row[*next]) / TOKENS as f32;
            row.iter_mut().for_each(|score| *score = (*score - most).exp() / sum / TOKENS as f32);
            row[*next] -= 1.0 / TOKENS as f32;
        }

        let mut dx = self.guess.backward(&h, &dguess);
        let dseen = self.out.backward(&seen, &dx);
        let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0f32; TOKENS * WIDTH]);
        let saved = Saved { q, k, v: Some(v), out: View::new(&seen, &SHAPE)?, lse: View::new(&lse, &LSE_SHAPE)? };
        let gradients = Gradients {
            dq: ViewMut::new(&mut dq, &SHAPE)?,
            dk: ViewMut::new(&mut dk, &SHAPE)?,
            dv: Some(ViewMut::new(&mut dv, &SHAPE)?),
        };
        self.plan.backward(saved, View::new(&dseen, &SHAPE)?, gradients).run()?;
        add(&mut dx, &self.q.backward(&x, &dq));
        add(&mut dx, &self.k.backward(&x, &dk));
        add(&mut dx, &self.v.backward(&x, &dv));
        for (row, letter) in dx.chunks(WIDTH).zip(input) {
            add(&mut self.embed.gradient[letter * WIDTH..][..WIDTH], row);
        }
        for weights in [&mut self.embed, &mut self.q, &mut self.k, &mut self.v, &mut self.out, &mut self.guess] {
            weights.step(step);
        }
        Ok(loss)
    }
}

/// A matrix, row by row, and what Adam knows of it.
struct Weights {
    columns: usize,
    values: Vec<f32>,
    gradient: Vec<f32>,
    moments: Vec<(f32, f32)>,
}

impl Weights {
    fn new(rows: usize, columns: usize, random: &mut Random) -> Self {
        let size = rows * columns;
        let values = (0..size).map(|_| (random.next() as f32 / (1 << 23) as f32 - 1.0) * 0.3).collect();
        Weights { columns, values, gradient: vec![0.0; size], moments: vec![(0.0, 0.0); size] }
    }

    /// Rows of x times the matrix.
    fn forward(&self, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0f32; TOKENS * self.columns];
        for (x, y) in x.chunks(WIDTH).zip(y.chunks_mut(self.columns)) {
            for (x, row) in x.iter().zip(self.values.chunks(self.columns)) {
                y.iter_mut().zip(row).for_each(|(y, w)| *y += x * w);
            }
        }
        y
    }

    /// The gradient at x; that of the matrix is added up.
    fn backward(&mut self, x: &[f32], dy: &[f32]) -> Vec<f32> {
        let mut dx = vec![0f32; TOKENS * WIDTH];
        for ((x, dx), dy) in x.chunks(WIDTH).zip(dx.chunks_mut(WIDTH)).zip(dy.chunks(self.columns)) {
            let rows = self.values.chunks(self.columns).zip(self.gradient.chunks_mut(self.columns));
            for ((x, dx), (row, gradient)) in x.iter().zip(dx).zip(rows) {
                *dx = row.iter().zip(dy).map(|(w, dy)| w * dy).sum();
                gradient.iter_mut().zip(dy).for_each(|(gradient, dy)| *gradient += x * dy);
            }
        }
        dx
    }

    /// Adam's.
    fn step(&mut self, step: usize) {
        let (first, second) = (1.0 - 0.9f32.powi(step as i32), 1.0 - 0.99f32.powi(step as i32));
        let parts = self.values.iter_mut().zip(&mut self.gradient).zip(&mut self.moments);
        for ((value, gradient), (mean, square)) in parts {
            *mean += 0.1 * (*gradient - *mean);
            *square += 0.01 * (*gradient * *gradient - *square);
            *value -= 0.01 * (*mean / first) / ((*square / second).sqrt() + 1e-8);
            *gradient = 0.0;
        }
    }
}

fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

/// 24 bits at a time.
struct Random(u32);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(1664525).wrapping_add(1013904223);
        self.0 >> 8
    }
}
