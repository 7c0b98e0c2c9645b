//! Which versions of a model are served.

use std::collections::BTreeSet;
use std::num::NonZero;

use serde::Deserialize;

/// OVMS's `model_version_policy`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum VersionPolicy {
    Latest {
        num_versions: NonZero<u64>,
    },
    // With braces, because the file has `{"all": {}}`.
    All {},
    /// These, if they exist.
    Specific {
        versions: Vec<NonZero<u64>>,
    },
}

impl Default for VersionPolicy {
    fn default() -> Self {
        Self::Latest { num_versions: NonZero::<u64>::MIN }
    }
}

impl VersionPolicy {
    /// Those of the available versions that are served.
    pub fn select(&self, available: &BTreeSet<i64>) -> BTreeSet<i64> {
        match self {
            Self::Latest { num_versions } => {
                let most = usize::try_from(num_versions.get()).unwrap_or(usize::MAX);
                available.iter().rev().take(most).copied().collect()
            }
            Self::All {} => available.clone(),
            Self::Specific { versions } => {
                let wanted = versions.iter().filter_map(|version| i64::try_from(version.get()).ok());
                wanted.filter(|version| available.contains(version)).collect()
            }
        }
    }
}

/// The number of a version by the name of its folder: decimal without leading zeros, from 1.
pub fn version_of(folder: &str) -> Option<i64> {
    // Strict, because tritonserver would accept other spellings, and exits if a number is too large for it.
    let version: i64 = folder.parse().ok()?;
    (version >= 1 && version.to_string() == folder).then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected(policy: &str, available: &[i64]) -> Vec<i64> {
        let policy: VersionPolicy = serde_json::from_str(policy).unwrap();
        policy.select(&available.iter().copied().collect()).into_iter().collect()
    }

    #[test]
    fn a_policy_selects_versions() {
        assert_eq!(VersionPolicy::default().select(&BTreeSet::from([1, 10, 9])), BTreeSet::from([10]));
        for (policy, expected) in [
            (r#"{"latest": {"num_versions": 2}}"#, vec![9, 10]),
            (r#"{"latest": {"num_versions": 9}}"#, vec![1, 9, 10]),
            (r#"{"all": {}}"#, vec![1, 9, 10]),
            (r#"{"specific": {"versions": [10, 1, 3]}}"#, vec![1, 10]),
            (r#"{"specific": {"versions": []}}"#, vec![]),
        ] {
            assert_eq!(selected(policy, &[1, 10, 9]), expected, "{policy}");
        }
    }

    #[test]
    fn a_wrong_policy_is_refused() {
        for policy in [
            "{}",
            "[]",
            r#""all""#,
            r#"{"all": {}, "latest": {"num_versions": 1}}"#,
            r#"{"all": {"x": 1}}"#,
            r#"{"latest": {"num_versions": 0}}"#,
            r#"{"latest": {}}"#,
            r#"{"specific": {"versions": [0]}}"#,
            r#"{"specific": {"versions": ["1"]}}"#,
            r#"{"newest": {}}"#,
        ] {
            assert!(serde_json::from_str::<VersionPolicy>(policy).is_err(), "{policy}");
        }
    }

    #[test]
    fn a_version_has_one_spelling() {
        for (folder, version) in [("1", Some(1)), ("9223372036854775807", Some(i64::MAX))] {
            assert_eq!(version_of(folder), version);
        }
        for folder in ["0", "01", "+1", "-1", " 1", "1 ", "1.0", "one", "", "9223372036854775808"] {
            assert_eq!(version_of(folder), None, "{folder}");
        }
    }
}
